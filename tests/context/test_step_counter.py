from __future__ import annotations

import torch

from raydist.context.step_counter import StepCounter


def test_it_counts_whole_numbers_and_is_in_the_state() -> None:
    counter = StepCounter()
    counter.value.add_(2**40)
    assert counter.state_dict() == {"value": torch.tensor(2**40)}
    assert counter.value.dtype == torch.int64
