"""Tensors passed between processes of a host through shared memory: copied once, and used in place by the reader.

An area belongs to its writer, and is as large as the largest content so far. Tensors of the same dtypes and shapes come
again and again: their layout is sent once, and then named by a number.
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
_LONG_FORM = 8192  # in bytes: a longer form travels in the area, not in a message
_Form = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


@final
@dataclass(frozen=True, slots=True)
class AreaAddress:
    """The address by which a reader finds an area.

    Attributes:
        name: Name of the memory segment.
        token: First bytes of the segment.
        size: Size of the segment in bytes.
    """

    name: str
    token: bytes
    size: int


@final
@dataclass(frozen=True, slots=True)
class AreaBlock:
    """A reference to tensors in an area.

    Attributes:
        number: Number of the layout.
        form: Dtypes and shapes, if the number is new: as a pickle, or as offset and length of the pickle in the area.
        address: Address of the area, if it is new: layouts of an earlier area are void then.
    """

    number: int
    form: bytes | tuple[int, int] | None = None
    address: AreaAddress | None = None


@final
class WriteArea:
    """The writer's side. It takes memory at the first `put`."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._left: list[Segment] = []
        self._known: dict[_Form, tuple[int, list[torch.Tensor], int]] = {}
        self._next = 0
        self._told = False

    def put(self, tensors: Sequence[torch.Tensor]) -> AreaBlock:
        """Copy tensors into the area, over its earlier content.

        Raises:
            UnavailableError: The host has no memory for the tensors.
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
        """Send layouts and address again, because the reader did not receive the last block."""
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
        """Forget all layouts; if more memory is needed, take twice as much as before, so that this is rare."""
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
        """Put the next content into new memory: the reader may not have read the present content yet."""
        segment, self._segment = self._segment, None
        self.forget()
        if segment is not None:
            self._left.append(segment)

    def all_read(self) -> None:
        """Release the memory that `leave` has set aside: the reader needs it no more."""
        left, self._left = self._left, []
        for segment in left:
            segment.close()

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self.leave()
        self.all_read()


@final
class ReadArea:
    """The reader's side."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._known: dict[int, list[torch.Tensor]] = {}

    def views(self, block: AreaBlock) -> list[torch.Tensor]:
        """Return views of the tensors; the writer's next block overwrites them.

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
        """Release the memory. May be called twice."""
        segment, self._segment = self._segment, None
        self._known.clear()
        if segment is not None:
            segment.close()


def _address_of(segment: Segment) -> AreaAddress:
    return AreaAddress(segment.name, segment.token, segment.size)


def _offsets(form: _Form) -> list[int]:
    """Return the offset of each tensor, and the end of the last one."""
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
