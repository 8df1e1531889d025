"""A file of records that is a list."""

from __future__ import annotations

from collections.abc import Sequence

from raydist.pipelines.formats.records import RecordReader


class ListReader(RecordReader):
    """The offset counts the bytes of records; an exception among them is an error at its place."""

    def __init__(self, items: Sequence[bytes | Exception], offset: int = 0, index: int = 0) -> None:
        self.offset, self.index, self.ended = offset, index, False
        self.closed = False
        self._items = items

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        records: list[bytes] = []
        while len(records) < limit and self.index < len(self._items):
            item = self._items[self.index]
            self.index += 1
            if isinstance(item, Exception):
                return records, item
            records.append(item)
            self.offset += len(item)
        self.ended = self.index == len(self._items)
        return records, None

    def _advance(self, records: list[bytes], limit: int) -> None:
        raise AssertionError("`read` does not call it")

    def close(self) -> None:
        self.closed = True
