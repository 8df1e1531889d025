"""What a manager must be given."""

from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from raydist.checkpoints.manager import require_arguments

GOOD: dict[str, Any] = {
    "checkpoint": rd.Checkpoint(state=rd.State()),
    "checkpoint_name": "ckpt",
    "init_fn": None,
    "exit_code": 0,
}


def test_what_is_meant_passes() -> None:
    require_arguments(**GOOD)
    require_arguments(**{**GOOD, "checkpoint_name": "a" * 180, "init_fn": print, "exit_code": 255})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("checkpoint", rd.State()),
        ("checkpoint_name", "a/b"),
        ("checkpoint_name", ""),
        ("checkpoint_name", "a" * 300),
        ("init_fn", 3),
        ("exit_code", 256),
        ("exit_code", True),
    ],
)
def test_all_else_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=f"{name} must"):
        require_arguments(**{**GOOD, name: value})
