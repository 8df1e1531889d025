"""Dataset.cache: keep the elements of a first complete pass in memory for later passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import Producer, ReplayIterator, read_item
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT

__all__ = ["CacheOp", "Kept"]


@final
class Kept:
    """The cached elements of one operation, in one process; pickles as empty.

    Passes with another root seed have other elements, so the seed is stored too.
    """

    def __init__(self) -> None:
        self._found: tuple[int, tuple[Block, ...]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def get(self, seed: int) -> tuple[Block, ...] | None:
        """Return the blocks of a complete pass, or None."""
        found = self._found
        return found[1] if found is not None and found[0] == seed else None

    def put(self, seed: int, blocks: Sequence[Block]) -> None:
        """Store the blocks of a complete pass; replaces any others."""
        self._found = (seed, tuple(blocks))


@final
@dataclass(frozen=True, eq=False)
class CacheOp(UnaryOp):
    """The elements of epoch 0 of `input`, read once."""

    passes_elements: ClassVar[bool] = True

    kept: Kept = field(default_factory=Kept, metadata=NOT_IN_FINGERPRINT)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        # Every pass is epoch 0 of the input, so that a new process makes the same elements.
        return ReplayIterator(_Caching(self, replace(ctx, epoch=(0,) * len(ctx.epoch))))


@final
class _Caching(Producer):
    """A producer that reads the cache, or fills it from the input. A pass with an error in it is not cached."""

    def __init__(self, op: CacheOp, ctx: IterContext) -> None:
        self._op = op
        self._ctx = ctx
        self._source: OpIterator | None = None
        self._read: list[Block] = []
        self._whole = True
        self._hits: list[Block] | None = None

    def make(self, limit: int) -> Sequence[Item]:
        if self._source is None and self._hits is None:
            self._open()
        if self._hits is not None:
            return [self._next_hit(limit)]
        return [self._next_read(limit)]

    def _open(self) -> None:
        kept = self._op.kept.get(self._ctx.seed)
        if kept is None:
            self._source = self._ctx.build(self._op.input)
        else:
            self._hits = list(reversed(kept))

    def _next_hit(self, limit: int) -> Block:
        if not self._hits:
            raise StopIteration
        block = self._hits.pop()
        if block.num_rows > limit:
            self._hits.append(block.slice(limit, block.num_rows))
            block = block.slice(0, limit)
        return block.shared()

    def _next_read(self, limit: int) -> Item:
        if self._source is None:
            raise StopIteration
        try:
            item = read_item(self._source, limit)
        except StopIteration:
            if self._whole:
                self._op.kept.put(self._ctx.seed, self._read)
                self._whole = False
            raise
        if isinstance(item, ElementError):
            self._whole = False
            return item
        self._read.append(item)
        return item.shared()

    def close(self) -> None:
        self._read = []
        self._whole = False
        if self._source is not None:
            self._source.close()
