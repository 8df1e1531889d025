"""How two ranks prove to each other, before anything else is said, that they are members of one group.

The caller draws a number; the one who was called answers with a number of its own and a code over both; the caller
says who it is, with a code over that and the other's number. Codes are made with the group's secret, which never
travels here. What follows is neither signed nor hidden, as with gloo.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import final

__all__ = ["ANSWER_BYTES", "GREETING_BYTES", "INTRODUCTION_BYTES", "Caller", "Credentials", "Introduction", "Listener"]

_CODE_BYTES = 32
GREETING_BYTES = 32
ANSWER_BYTES = 32 + _CODE_BYTES
_INTRODUCTION = struct.Struct("!IIB")
INTRODUCTION_BYTES = _INTRODUCTION.size + _CODE_BYTES


@final
@dataclass(frozen=True, slots=True)
class Credentials:
    """What members of one generation of a group know.

    Attributes:
        group: Name and generation: a proof for one is none for another.
        secret: Known to the members only.
    """

    group: str
    secret: bytes

    def code(self, role: str, *said: bytes) -> bytes:
        return hmac.digest(self.secret, "\0".join((self.group, role, "")).encode() + b"".join(said), "sha256")


@final
@dataclass(frozen=True, slots=True)
class Introduction:
    """Who calls whom, to send what.

    Attributes:
        source: The caller's rank.
        destination: The rank that it calls.
        topic: What the connection is for.
    """

    source: int
    destination: int
    topic: int


@final
class Caller:
    """The caller's side.

    >>> credentials = Credentials("g/0", b"secret")
    >>> caller, listener = Caller(credentials), Listener(credentials)
    >>> hello = Introduction(source=1, destination=0, topic=2)
    >>> listener.introduced(caller.introduce(listener.answer(caller.greeting), hello) or b"") == hello
    True
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.greeting = secrets.token_bytes(GREETING_BYTES)

    def introduce(self, answer: bytes, introduction: Introduction) -> bytes | None:
        """What is said to an answer, None where it is not a member's."""
        number, code = answer[:GREETING_BYTES], answer[GREETING_BYTES:]
        if not hmac.compare_digest(code, self._credentials.code("answer", self.greeting, number)):
            return None
        said = _INTRODUCTION.pack(introduction.source, introduction.destination, introduction.topic)
        return said + self._credentials.code("introduction", number, said)


@final
class Listener:
    """The side of the one who is called."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._number = secrets.token_bytes(GREETING_BYTES)

    def answer(self, greeting: bytes) -> bytes:
        return self._number + self._credentials.code("answer", greeting, self._number)

    def introduced(self, said: bytes) -> Introduction | None:
        """Who calls, None where it is not a member."""
        text, code = said[: _INTRODUCTION.size], said[_INTRODUCTION.size :]
        if not hmac.compare_digest(code, self._credentials.code("introduction", self._number, text)):
            return None
        return Introduction(*_INTRODUCTION.unpack(text))
