from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.engine.kernel import Kernel, StageSpec, run_stage
from tests.pipelines.engine.toy_stages import SOURCE, block_of, divide, spec_of


def test_kernels_run_one_after_the_other_and_errors_keep_their_place() -> None:
    spec = spec_of(SOURCE.map(divide).filter(lambda x: x != 3).map(lambda x: x + 1))
    result = run_stage(spec, block_of(SOURCE), (100, 100, 50))
    error, *blocks = result.items
    assert isinstance(error, ElementError)
    assert (type(error.error), error.index, error.kernel) == (ZeroDivisionError, 100, 0)
    assert [x for block in blocks if isinstance(block, Block) for x in block.rows()] == [7, 3, 2, 2]
    assert result.inputs == (6, 6, 5)


def test_other_structures_become_errors_measured_by_the_first_or_by_what_is_known() -> None:
    spec = spec_of(SOURCE.map(lambda x: (x,) if x == 0 else x))
    first = run_stage(spec, block_of(SOURCE), (0,))
    assert [isinstance(item, ElementError) for item in first.items] == [False] + [True] * 5
    known = run_stage(spec, block_of(SOURCE), (0,), ("* of int64",))
    assert [isinstance(item, ElementError) for item in known.items] == [True, False]
    assert known.signatures == ("* of int64",)


def test_a_kernel_that_fails_as_a_whole_is_run_row_by_row() -> None:
    @final
    class Picky(Kernel):
        label = "picky-1"

        @property
        def uses_index(self) -> bool:
            return False

        def run(self, block: Block, start: int) -> Sequence[Item]:
            if 2 in block.columns[0]:
                raise MemoryError("too large")
            return [block]

    items = run_stage(StageSpec("stage", (Picky(),)), block_of(SOURCE), (10,)).items
    assert [item.index if isinstance(item, ElementError) else item.rows() for item in items] == [
        [0],
        [1],
        12,
        [3],
        [4],
        [5],
    ]


def test_a_stage_and_its_result_can_be_sent() -> None:
    spec = pickle.loads(pickle.dumps(spec_of(SOURCE.map(divide))))
    result = pickle.loads(pickle.dumps(run_stage(spec, block_of(SOURCE).slice(1, 6), (1,))))
    assert result.items[0].rows() == [6, 3, 2, 1, 1]
