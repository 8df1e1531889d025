"""Tensors from one process to another: copied once into memory that both have mapped, and used where they lie there.

An area belongs to the one that writes it, and is as large as the most that was ever written. Tensors of the same dtypes
and shapes come again and again: how they lie is said once, and then named by a number.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.compat.torch_internals import foreach_copy
from raydist.errors import UnavailableError
from raydist.shared_segment import Segment

__all__ = ["AreaAddress", "AreaBlock", "ReadArea", "WriteArea"]

_FIRST_BYTE, _LINE, _PAGE = 4096, 64, 4096
_FORMS_KEPT = 64
_LONG_FORM = 8192  # bytes of a form that does not travel in a message
_Form = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


@final
@dataclass(frozen=True, slots=True)
class AreaAddress:
    """By what the reader finds an area.

    Attributes:
        name: Of the memory.
        token: Its first bytes.
        size: Of it in bytes.
    """

    name: str
    token: bytes
    size: int


@final
@dataclass(frozen=True, slots=True)
class AreaBlock:
    """Tensors in an area.

    Attributes:
        number: Of how they lie.
        form: Their dtypes and shapes, where the number is new: as a pickle, or where that lies and its length.
        address: Of the area, where it is new: what was known of another one holds no more.
    """

    number: int
    form: bytes | tuple[int, int] | None = None
    address: AreaAddress | None = None


@final
class WriteArea:
    """The writer's end. Made empty; has memory once there is something to write."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._left: list[Segment] = []
        self._known: dict[_Form, tuple[int, list[torch.Tensor], int]] = {}
        self._next = 0
        self._told = False

    def put(self, tensors: Sequence[torch.Tensor]) -> AreaBlock:
        """Copy tensors in; what was there before is overwritten.

        Raises:
            UnavailableError: There is no memory for them.
        """
        form = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        known = self._known.get(form)
        said = b""
        if known is None:
            said = pickle.dumps(form, pickle.HIGHEST_PROTOCOL)
            known = self._lay_out(form, len(said))
        number, views, end = known
        with torch.no_grad():
            foreach_copy(views, list(tensors))
        address = None if self._told or self._segment is None else _address_of(self._segment)
        self._told = True
        if len(said) > _LONG_FORM and self._segment is not None:
            self._segment.bytes()[end : end + len(said)] = said
            return AreaBlock(number, (end, len(said)), address)
        return AreaBlock(number, said or None, address)

    def forget(self) -> None:
        """The reader has not heard of what was put last: say everything again."""
        self._known.clear()
        self._told = False

    def _lay_out(self, form: _Form, said_bytes: int) -> tuple[int, list[torch.Tensor], int]:
        segment = self._segment
        end = _offsets(form)[-1]
        needed = end + said_bytes
        if segment is None or needed > segment.size or len(self._known) >= _FORMS_KEPT:
            segment = self._renewed(needed)
        self._known[form] = self._next, _views(segment, form), end
        self._next += 1
        return self._known[form]

    def _renewed(self, needed: int) -> Segment:
        """Forget all forms; take new memory where they need more, twice as much as before so that it seldom happens."""
        self._known.clear()
        self._told = False
        held = 0 if self._segment is None else self._segment.size
        if self._segment is not None and needed <= held:
            return self._segment
        size = -(-max(needed, min(2 * held, held + (64 << 20))) // _PAGE) * _PAGE
        self.leave()
        try:
            self._segment = Segment.create_nameless(size)
        except OSError as error:
            raise UnavailableError(
                f"Gradients and values of {size:,} bytes must fit into the host's memory on their way to or from a "
                f"parameter server, but it gave none: {error.strerror or error}. Give the host more memory."
            ) from error
        return self._segment

    def leave(self) -> None:
        """Put what comes next into new memory: the reader may not have looked into this yet."""
        segment, self._segment = self._segment, None
        self.forget()
        if segment is not None:
            self._left.append(segment)

    def all_read(self) -> None:
        """The reader needs nothing any more of what was put so far."""
        left, self._left = self._left, []
        for segment in left:
            segment.close()

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        self.leave()
        self.all_read()


@final
class ReadArea:
    """The reader's end."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._known: dict[int, list[torch.Tensor]] = {}

    def views(self, block: AreaBlock) -> list[torch.Tensor]:
        """The tensors where they lie; the writer's next block overwrites them.

        Raises:
            OSError: The writer's memory cannot be opened.
        """
        if block.address is not None:
            self._open(block.address)
        if block.form is not None and self._segment is not None:
            said = block.form
            if not isinstance(said, bytes):
                said = bytes(self._segment.bytes()[said[0] : said[0] + said[1]])
            self._known[block.number] = _views(self._segment, pickle.loads(said))
        return self._known[block.number]

    def _open(self, address: AreaAddress) -> None:
        if self._segment is None or self._segment.token != address.token:
            self.close()
            self._segment = Segment.open(address.name, address.size, address.token)
        self._known.clear()

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        segment, self._segment = self._segment, None
        self._known.clear()
        if segment is not None:
            segment.close()


def _address_of(segment: Segment) -> AreaAddress:
    return AreaAddress(segment.name, segment.token, segment.size)


def _offsets(form: _Form) -> list[int]:
    """Where each tensor begins, and where the last one ends."""
    offsets = [_FIRST_BYTE]
    for dtype, shape in form:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        offsets.append(offsets[-1] + -(-num_bytes // _LINE) * _LINE)
    return offsets


def _views(segment: Segment, form: _Form) -> list[torch.Tensor]:
    return [
        segment.view(offset, torch.Size(shape).numel(), dtype).view(shape)
        for offset, (dtype, shape) in zip(_offsets(form), form, strict=False)
    ]
