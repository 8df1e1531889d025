from __future__ import annotations

import pytest

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.stages.stage_dispatch import StageDispatch, StageWorkers
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.meter import Meter
from tests.pipelines.engine.toy_stages import SOURCE, block_of, divide, spec_of


def test_a_window_is_what_the_executor_has_and_the_user_allows() -> None:
    executor = ThreadExecutor(4)
    assert [StageWorkers(executor, most).window for most in (None, 2, 9)] == [4, 2, 4]
    executor.close()


def test_results_are_counted_and_their_errors_explained() -> None:
    meter = Meter("stage")
    results = StageDispatch(spec_of(SOURCE.map(divide)), StageWorkers(InlineExecutor()), meter)
    flight = results.send(block_of(SOURCE), (100,), 0.0)
    assert meter.buffered == 6
    error, block = results.receive(flight, (50,)).items
    assert isinstance(error, ElementError)
    assert error.error.__notes__[0].endswith("element 50 of its input.")
    assert isinstance(block, Block)
    assert meter.buffered == 0
    assert results.signatures == ("* of int64",)


def test_an_owned_executor_is_closed() -> None:
    executor = ThreadExecutor(1)
    StageDispatch(spec_of(SOURCE.map(abs)), StageWorkers(executor, owned=True), Meter("stage")).close()
    with pytest.raises(Exception, match="closed"):
        executor.submit(spec_of(SOURCE.map(abs)), block_of(SOURCE), (0,))
