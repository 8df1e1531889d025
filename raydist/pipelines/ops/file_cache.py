"""Dataset.cache with a file name: keep the elements of a first complete pass in files for all later passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.pass_over import Store, StoredPass, StoredPassSettings

__all__ = ["FileCacheOp"]


@final
@dataclass(frozen=True, eq=False)
class FileCacheOp(UnaryOp):
    """The elements of epoch 0 of `input`, read once and kept in the directory `path`."""

    passes_elements: ClassVar[bool] = True

    path: str

    @property
    def name(self) -> str:
        return "cache"

    @property
    def label(self) -> str:
        return f"cache({self.path!r})"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        # Every pass is epoch 0 of the input, so that every writer makes the same elements.
        first = replace(ctx, epoch=(0,) * len(ctx.epoch))
        store = Store(self.path, Container.of("arrow", None))
        settings = StoredPassSettings(store, lambda: first.build(self.input), ctx.seed, self.label, False)
        return BorderIterator(StoredPass(settings))
