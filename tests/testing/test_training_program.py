from __future__ import annotations

import pytest
import torch

import raydist as rd
from raydist.testing.training_program import MODELS, Program, train_alone, train_distributed


@pytest.mark.parametrize("model", sorted(MODELS))
def test_programs_are_the_same_every_time_and_train(model: str) -> None:
    program = Program(model, "sgd", num_rows=7, batch_size=3, clip=False, accumulate=2, schedule=True, seed=1)
    one, other = train_alone(program), train_distributed(program, rd.OneDeviceStrategy("cpu"))
    assert len(one.losses) == program.num_steps == 3
    assert all(torch.equal(one.after[name], other.after[name]) for name in one.after)
    assert any(not torch.equal(one.before[name], one.after[name]) for name in one.after)


def test_updates_come_after_what_is_accumulated_and_at_the_end() -> None:
    program = Program("linear", "sgd", num_rows=9, batch_size=2, clip=False, accumulate=2, schedule=False, seed=1)
    assert [program.updates_after(index) for index in range(program.num_steps)] == [False, True, False, True, True]
