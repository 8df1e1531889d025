"""What optimizers are to remember is what torch's `load_state_dict` makes of it, with the types of the file."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.checkpoints.sharing.restore_orders import StoredMemory
from raydist.checkpoints.sharing.stored_memories import taken_options, taken_state


def memory(**options: Any) -> StoredMemory:
    return StoredMemory("adam", 5, 1, "adam", "w", (3,), 0, {}, options)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_as_after_load_state_dict_with_the_saved_types(dtype: torch.dtype, fused: bool | None) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    state = {"step": torch.tensor(3.0).double(), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3).double()}
    saved: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = state
    saved["param_groups"][0]["fused"] = fused
    optimizer.load_state_dict(saved)
    expected = optimizer.state[parameter]
    options = {name: value for name, value in saved["param_groups"][0].items() if name != "params"}
    found = taken_state(memory(**options), state, torch.optim.Adam, dtype)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0, check_dtype=False)
    assert {name: each.dtype for name, each in found.items()} == {
        **{name: each.dtype for name, each in state.items()},
        "step": expected["step"].dtype,
    }


def test_options_are_as_after_load_state_dict_and_nothing_is_changed() -> None:
    layer = torch.nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.5}]
    adam = torch.optim.Adam(groups)
    before = copy.deepcopy(adam.state_dict())
    saved = [{"lr": 0.25, "mine": (1, 2), "params": ["weight"]}, {"lr": 0.125, "params": ["bias"]}]
    found = taken_options("adam", adam, saved)
    assert adam.state_dict() == before
    adam.load_state_dict({"state": {}, "param_groups": [{**group, "params": [n]} for n, group in enumerate(saved)]})
    expected = [{key: each for key, each in group.items() if key != "params"} for group in adam.param_groups]
    assert found == expected
    with pytest.raises(rd.InvalidArgumentError, match=r"saved state of 'adam' must be one that a Adam takes.*groups"):
        taken_options("adam", adam, saved[:1])
