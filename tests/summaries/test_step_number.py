from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.summaries.step_number import step_number


@pytest.mark.parametrize("step", [3, np.int32(3), np.array(3), torch.tensor(3), torch.tensor([3])])
def test_whole_numbers_of_all_kinds_are_steps(step: Any) -> None:
    assert step_number(step) == 3
    assert type(step_number(step)) is int


@pytest.mark.parametrize("step", [1.5, "3", True, torch.tensor(1.5), torch.tensor([1, 2]), [3], 2**63, -(2**63) - 1])
def test_other_things_are_not(step: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="The step of a summary must be a whole number, got"):
        step_number(step)
