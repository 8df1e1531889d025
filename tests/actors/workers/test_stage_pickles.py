from __future__ import annotations

import pickle
import threading

import pytest

from raydist.actors.workers.pool import StagePickles
from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.kernel import run_stage
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of


def test_a_stage_is_pickled_once_and_named_by_its_contents() -> None:
    pickles = StagePickles(most=2)
    double, other = spec_of(SOURCE.map(lambda x: x * 2)), spec_of(SOURCE.map(lambda x: x * 3))
    digest, data = pickles.get(double)
    assert pickles.get(double)[1] is data
    assert pickles.get(other)[0] != digest
    (block,) = run_stage(pickle.loads(data), block_of(SOURCE), (0,)).items
    assert isinstance(block, Block)
    assert block.rows() == [0, 2, 4, 6, 8, 10]
    pickles.get(spec_of(SOURCE.map(abs)))
    assert pickles.get(double)[1] is not data, "only the last two are kept"
    assert pickles.get(double)[0] == digest


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidArgumentError, match=r"map-1 .*lock.*num_input_workers=0"):
        StagePickles(most=2).get(spec_of(SOURCE.map(lambda x: lock)))
