from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import SpecError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.declared_output import DeclaredOutput
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec


def declared(nest: object) -> DeclaredOutput:
    output = DeclaredOutput.parse(nest)
    assert output is not None
    return output


def test_nothing_declared() -> None:
    assert DeclaredOutput.parse(None) is None
    with pytest.raises(SpecError, match=r"must be a nest of rd\.TensorSpec, got a leaf 'int64'"):
        DeclaredOutput.parse({"x": "int64"})


def test_a_matching_block_gets_the_declared_specs() -> None:
    spec = TensorSpec((None,), np.float64)
    (block,) = declared({"x": spec}).conform([block_of_rows([{"x": np.zeros(2)}])], 0)
    assert isinstance(block, Block)
    assert block.specs == (spec,)


def test_each_row_is_judged_by_itself() -> None:
    rows = block_of_rows([np.zeros(2), np.zeros((1, 1)), np.zeros(3)])
    items = declared(TensorSpec((None,), np.float64)).conform([rows], 7)
    assert [isinstance(item, ElementError) for item in items] == [False, True, False]
    error = items[1]
    assert isinstance(error, ElementError)
    assert error.index == 8
    assert "got TensorSpec(shape=(1, 1), dtype=float64)" in str(error.error)


def test_errors_pass_and_keep_counting() -> None:
    earlier = ElementError(ValueError("x"), 0)
    items = declared(TensorSpec((), np.int64)).conform([earlier, block_of_rows([1.5])], 0)
    assert items[0] is earlier
    assert isinstance(items[1], ElementError)
    assert items[1].index == 1
