"""Ids of tokens: by a vocabulary, and back; or by hashes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Self, final

import numpy as np
import pyarrow as pa

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.formats.files import create_file, path_text, read_file
from raydist.text.step import TextStep, is_list, map_values, to_arrow

_Ids = np.ndarray[Any, np.dtype[np.int64]]
_PAD, _UNKNOWN = "", "[UNK]"
_COUNTED_AT_ONCE = 1024


@final
@dataclass(frozen=True)
class Vocabulary(TextStep):
    """The id of every string or token, as int64.

    0 is never given: it is for padding. Then come `num_oov_buckets` ids for strings that are no terms, each string
    having its own one by its hash (that of :class:`HashBuckets`); then the terms in their order.

    Attributes:
        terms: The known strings, each once.
        num_oov_buckets: Ids for unknown strings; without any, an unknown string is an InvalidArgumentError.

    Raises:
        InvalidArgumentError: A term stands there twice, or `num_oov_buckets` is negative.

    Source: tf.keras.layers.StringLookup(mask_token="").

    >>> vocabulary = rd.text.Vocabulary(("cat", "dog"))
    >>> vocabulary(["dog", "cow", "cat"]).tolist(), vocabulary.size
    ([3, 1, 2], 4)
    """

    terms: tuple[str, ...]
    num_oov_buckets: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", tuple(self.terms))
        if not isinstance(self.num_oov_buckets, int) or self.num_oov_buckets < 0:
            raise InvalidArgumentError(f"num_oov_buckets must be an int >= 0, got {self.num_oov_buckets!r}.")
        if not all(isinstance(term, str) for term in self.terms):
            wrong = next(term for term in self.terms if not isinstance(term, str))
            raise InvalidArgumentError(f"The terms of a vocabulary must be str, got {wrong!r:.80}.")
        if len(self._ids) < len(self.terms):
            ((twice, count),) = Counter(self.terms).most_common(1)
            raise InvalidArgumentError(f"The terms of a vocabulary must differ, got {twice!r:.80} {count} times.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.terms, self.num_oov_buckets)  # without what is cached

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {term: id_ for id_, term in enumerate(self.terms, 1 + self.num_oov_buckets)}

    @property
    def size(self) -> int:
        """Number of ids, padding and unknown strings included: rows of an embedding."""
        return 1 + self.num_oov_buckets + len(self.terms)

    @classmethod
    def build(
        cls,
        texts: Iterable[Any],
        *,
        split: TextStep | None = None,
        max_terms: int | None = None,
        min_count: int = 1,
        num_oov_buckets: int = 1,
    ) -> Self:
        """The terms that occur in `texts`, frequent ones first; equally frequent ones in the order of their characters.

        Reads all of `texts`, and keeps one count for every distinct term.

        Args:
            texts: A dataset, or any iterable, of strings or arrays of strings.
            split: Makes tokens of texts; None takes each text as one term.
            max_terms: Keep so many at most.
            min_count: Keep what occurs so often at least.
            num_oov_buckets: See the class.

        Raises:
            InvalidArgumentError: `max_terms` or `min_count` is < 1, or a text is not valid UTF-8.

        Source: tf.keras.layers.StringLookup.adapt.

        >>> rd.text.Vocabulary.build(["b a", "b"], split=rd.text.Split()).terms
        ('b', 'a')
        """
        for name, value in (("max_terms", max_terms), ("min_count", min_count)):
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} must be >= 1, got {value}.")
        counts = _count(texts, split)
        frequent = sorted((-count, term) for term, count in counts.items() if count >= min_count)
        return cls(tuple(term for _, term in frequent[:max_terms]), num_oov_buckets)

    @classmethod
    def from_file(cls, path: Any, *, num_oov_buckets: int = 1) -> Self:
        """The vocabulary in a text file with one term a line, as :meth:`save` writes it.

        Args:
            path: Of a file in UTF-8: local or a URI.
            num_oov_buckets: See the class; the file does not hold it.

        Raises:
            NotFoundError: There is no such file.
            InvalidArgumentError: It is not UTF-8, or has a term twice.

        Source: tf.keras.layers.StringLookup(vocabulary=path).

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "terms.txt")
        >>> rd.text.Vocabulary(("cat", "dog")).save(path)
        >>> rd.text.Vocabulary.from_file(path).terms
        ('cat', 'dog')
        """
        try:
            lines = read_file(path).decode().split("\n")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(f"A vocabulary must be UTF-8, got {path_text(path)!r}: {error}.") from error
        terms = lines[:-1] if lines[-1] == "" else lines
        return cls(tuple(term.removesuffix("\r") for term in terms), num_oov_buckets)

    def save(self, path: Any) -> None:
        """Write the terms, one a line, for :meth:`from_file`. Returns when the file is closed.

        Args:
            path: Local or a URI. A file of this name is replaced.

        Raises:
            InvalidArgumentError: A term has a line break in it.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "terms.txt")
        >>> rd.text.Vocabulary(("cat", "dog")).save(path)
        >>> rd.image.read_file(path)
        b'cat\\ndog\\n'
        """
        broken = [term for term in self.terms if "\n" in term or term.endswith("\r")]
        if broken:
            raise InvalidArgumentError(f"A term must be without line breaks to be saved, got {broken[0]!r:.80}.")
        with create_file(path_text(path)) as file:
            file.write("".join(f"{term}\n" for term in self.terms).encode())

    def apply(self, array: pa.Array) -> pa.Array:
        """int64, or lists of int64."""
        return by_distinct_text(array, "Vocabulary", self._ids_of)

    def _ids_of(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
        ids = list(map(self._ids.get, texts))
        if None in ids:
            ids = [self._unknown(text) if id_ is None else id_ for id_, text in zip(ids, texts, strict=True)]
        return np.array(ids, np.int64)

    def _unknown(self, text: str) -> int:
        if self.num_oov_buckets == 0:
            raise InvalidArgumentError(
                f"Every string must be one of the {len(self.terms)} terms of the vocabulary, got {text!r:.80}. "
                "num_oov_buckets=1 gives unknown strings an id."
            )
        return 1 + bucket_of(text, self.num_oov_buckets)

    def terms_of(self, ids: Any) -> Any:
        """The terms of ids: "" for padding, "[UNK]" for unknown ones.

        Args:
            ids: An array of whole numbers of any shape, or one of them.

        Returns:
            An object array of str of the same shape; for one id its term.

        Raises:
            InvalidArgumentError: An id is negative, or not below `size`.

        Source: tf.keras.layers.StringLookup(invert=True).

        >>> rd.text.Vocabulary(("cat", "dog")).terms_of(np.array([3, 1, 0])).tolist()
        ['dog', '[UNK]', '']
        """
        numbers = np.asarray(ids)
        wrong = numbers[(numbers < 0) | (numbers >= self.size)]
        if wrong.size:
            raise InvalidArgumentError(f"Ids of this vocabulary are 0 to {self.size - 1}, got {wrong.flat[0]}.")
        return self._names[numbers]

    @cached_property
    def _names(self) -> np.ndarray[Any, np.dtype[np.object_]]:
        return np.array([_PAD, *[_UNKNOWN] * self.num_oov_buckets, *self.terms], dtype=object)


def _count(texts: Any, split: TextStep | None) -> Counter[str]:
    elements = iter(texts.as_numpy_iterator() if hasattr(texts, "as_numpy_iterator") else texts)
    counts: Counter[str] = Counter()
    while some := list(islice(elements, _COUNTED_AT_ONCE)):
        for values in [some] if isinstance(some[0], str | bytes) else some:
            array, _ = to_arrow(values)
            tokens = array if split is None else split.apply(array)
            distinct = (tokens.values if is_list(tokens) else tokens).value_counts()
            counts.update(dict(zip(distinct.field(0).to_pylist(), distinct.field(1).to_pylist(), strict=True)))
    return counts


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
