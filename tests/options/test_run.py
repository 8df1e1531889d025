from __future__ import annotations

from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp
from raydist.options import RunOptions


def test_run_options_take_a_reduction_by_name() -> None:
    assert RunOptions(gradient_reduce_op="sum").gradient_reduce_op is ReduceOp.SUM  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_reduce_op": "MAX"}, "gradient_reduce_op must be SUM or MEAN, got 'MAX'"),
        ({"gradient_reduce_op": "average"}, "got 'average'"),
        ({"empty_batch": "skip"}, "empty_batch must be .* got 'skip'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be .* got 'ignore'"),
    ],
)
def test_run_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RunOptions(**arguments)
