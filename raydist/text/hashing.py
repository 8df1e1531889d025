"""Text to numbers without a vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa

from raydist.errors import InvalidArgumentError, SpecError
from raydist.text.convert import map_values
from raydist.text.step import TextStep

__all__ = ["HashBuckets", "bucket_of", "by_distinct_text"]

_Ids = np.ndarray[Any, np.dtype[np.int64]]


def bucket_of(text: str, num_buckets: int, salt: int = 0) -> int:
    """The bucket of one string: BLAKE2b of its UTF-8 (8 bytes, little endian), modulo `num_buckets`.

    >>> bucket_of("cat", 1000)
    939
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=salt.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") % num_buckets


def by_distinct_text(array: pa.Array, what: str, ids_of: Callable[[Sequence[str]], _Ids]) -> pa.Array:
    """`ids_of` of every text, or of every token of lists; called once, with the distinct ones."""

    def ids(flat: pa.Array) -> pa.Array:
        if not pa.types.is_large_string(flat.type):
            raise SpecError(f"{what} takes text or tokens, got {flat.type}.")
        encoded = flat.dictionary_encode()
        distinct = encoded.dictionary.to_numpy(zero_copy_only=False).tolist()
        return pa.array(ids_of(distinct)[encoded.indices.to_numpy()])

    return map_values(array, ids)


@final
@dataclass(frozen=True)
class HashBuckets(TextStep):
    """An id for every string or token: `first_id` plus its hash modulo `num_buckets`, as int64.

    The hash is BLAKE2b (RFC 7693) with 8 bytes, read as a little-endian integer: the same on every machine, in every
    process and version. It is computed once for every distinct string of a call.

    Attributes:
        num_buckets: Number of ids; different strings may share one.
        salt: Another salt is another hash function; >= 0.
        first_id: Smallest id: 1 leaves 0 for padding.

    Raises:
        InvalidArgumentError: `num_buckets` < 1, or `salt` or `first_id` negative.

    Source: tf.strings.to_hash_bucket_strong (with another hash).

    >>> rd.text.HashBuckets(1000)(["cat", "dog", "cat"]).tolist()
    [939, 465, 939]
    """

    num_buckets: int
    salt: int = 0
    first_id: int = 0

    def __post_init__(self) -> None:
        for name, smallest, limit in (("num_buckets", 1, 2**62), ("salt", 0, 2**64), ("first_id", 0, 2**62)):
            value = getattr(self, name)
            if not isinstance(value, int) or not smallest <= value < limit:
                raise InvalidArgumentError(f"{name} must be an int >= {smallest} and < {limit}, got {value!r}.")

    def apply(self, array: pa.Array) -> pa.Array:
        """int64, or lists of int64."""
        return by_distinct_text(array, "HashBuckets", self._ids)

    def _ids(self, texts: Sequence[str]) -> _Ids:
        buckets = [self.first_id + bucket_of(text, self.num_buckets, self.salt) for text in texts]
        return np.array(buckets, np.int64)
