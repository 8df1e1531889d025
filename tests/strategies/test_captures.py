"""What a step does to Python objects that it captured stays in a copy; the program is told once."""

from __future__ import annotations

import warnings

import pytest
import torch

import raydist as rd

pytestmark = pytest.mark.ray


def test_a_step_that_appends_to_a_captured_list_is_warned_of_once(two: rd.MirroredStrategy) -> None:
    losses: list[float] = []

    def step(value: float) -> torch.Tensor:
        losses.append(value)
        return torch.tensor(value)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            two.local_results(two.run(step, args=(1.0,)))
    assert losses == []
    (warning,) = caught
    assert "'step'" in str(warning.message)
    assert "changed losses: the program's own stays as it is" in str(warning.message)


def test_a_method_that_counts_is_warned_of_when_its_results_are_not_read(two: rd.MirroredStrategy) -> None:
    class Trainer:
        count = 0

        def step(self) -> None:
            self.count += 1

    trainer = Trainer()
    two.run(trainer.step)
    with pytest.warns(UserWarning, match=r"'step' .* changed self.count"):
        two.local_results(two.run(lambda: 1))
    assert trainer.count == 0
