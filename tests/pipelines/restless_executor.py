"""An executor that makes every change that an autotuner may make between two blocks."""

from __future__ import annotations

from typing import final

from raydist.options import Options
from raydist.pipelines.autotune.tuned_executor import TunedPart, TunedPrefetch, TunedStage
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter

__all__ = ["RestlessExecutor"]


@final
class RestlessExecutor(Executor):
    """Moves every stage to threads and back, and starts and stops reading ahead, after every `every` blocks."""

    window = 1

    def __init__(self, options: Options, every: int = 2) -> None:
        self._every = every
        self._looks = 0
        self.parts: list[TunedPart] = []

    def for_stage(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> Executor:
        stage = TunedStage(meter, budgets, self._look)
        self.parts.append(stage)
        return stage

    def for_prefetch(
        self,
        meter: Meter,
        meters: IterationMeters,
        budgets: Budgets,
        *,
        threads: int = 1,
        requested: bool = False,
        inside: Meter | None = None,
    ) -> TunedPrefetch:
        prefetch = TunedPrefetch(meter, budgets, self._look, threads=threads, requested=requested, inside=inside)
        self.parts.append(prefetch)
        return prefetch

    def _look(self, part: TunedPart) -> None:
        self._looks += 1
        if self._looks % self._every == 0:
            part.apply(0 if part.threads else 2, row_s=0.001, block_bytes=100)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        return InlineExecutor().submit(spec, block, starts)

    def close(self) -> None:
        for part in self.parts:
            part.end()
