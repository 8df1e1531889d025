"""A store whose entries prove that a member of the group wrote them.

Anybody who reaches its port can read and write a TCPStore. So each value carries a code made with the group's secret,
which travels by Ray alone; one without it counts as not written. A stranger can still delete, and so keep a group from
forming: that ends with the limit of the wait, in an error.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Store

from raydist.errors import DataLossError

__all__ = ["SignedStore"]

_CODE_BYTES = 32


@final
class SignedStore(Store):
    """The keys of one generation of one group. Any thread may use it.

    It has what members of a group and gloo need; counters, which the server itself would have to sign, are missing.

    Args:
        inner: Holds the entries.
        prefix: Stands before every key, and is signed with it: an entry proves nothing under another group's name.
        secret: Known to the members only.

    >>> from torch._C._distributed_c10d import HashStore
    >>> entries = HashStore()
    >>> store = SignedStore(entries, "group/0", b"secret")
    >>> store.set("key", "value")
    >>> store.get("key"), store.check(["key"])
    (b'value', True)
    >>> entries.set("group/0/key", "forged")
    >>> store.check(["key"])
    False
    """

    def __init__(self, inner: Store, prefix: str, secret: bytes) -> None:
        super().__init__()
        self.inner = inner
        self.prefix = prefix
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        """Write an entry, over whatever was there."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.inner.set(self._full(key), self._code(key, data) + data)  # type: ignore[arg-type]  # takes bytes as well

    def get(self, key: str) -> bytes:
        """The value of an entry. Blocking: until it is written, at most the inner store's limit.

        Raises:
            DataLossError: No member wrote it.
        """
        value = self._verified(key)
        if value is None:
            raise DataLossError(
                f"The entry {self._full(key)!r} of the rendezvous store must be written by a member of the group, and "
                "was not. Another program writes there: look for it on the machine of the group's owner."
            )
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether members have written all of these."""
        return all(self.peek(key) is not None for key in keys)

    def peek(self, key: str) -> bytes | None:
        """The value of an entry, None where no member has written it yet. Does not wait."""
        return self._verified(key) if self.inner.check([self._full(key)]) else None

    def replace(self, key: str, before: bytes | None, value: bytes) -> bytes | None:
        """Write an entry where it still has the value `before` (None: is not there); the value that it has then.

        Of several members that replace the same value one succeeds.
        """
        expected = b"" if before is None else self._code(key, before) + before
        full = self._full(key)
        self.inner.compare_set(full, expected, self._code(key, value) + value)  # type: ignore[arg-type]  # takes bytes
        return self.peek(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all of these are there; raises the inner store's error after the limit."""
        full = [self._full(key) for key in keys]
        if timeout is None:
            self.inner.wait(full)
        else:
            self.inner.wait(full, timeout)

    def has_extended_api(self) -> bool:
        """Several entries at once: no."""
        return False

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _verified(self, key: str) -> bytes | None:
        data = self.inner.get(self._full(key))
        code, value = data[:_CODE_BYTES], data[_CODE_BYTES:]
        return value if hmac.compare_digest(code, self._code(key, value)) else None

    def _code(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, self._full(key).encode() + b"\0" + value, "sha256")
