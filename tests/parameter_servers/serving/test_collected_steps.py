from __future__ import annotations

import torch

from raydist.parameter_servers.serving.changes import CollectedSteps
from raydist.parameter_servers.serving.optimizers import PushedRows, ServerGradients


def dense(*values: float) -> ServerGradients:
    return ServerGradients({0: torch.tensor(values)}, {})


def rows(*numbers: int, value: float = 1.0) -> PushedRows:
    return PushedRows(torch.tensor(numbers), torch.full((len(numbers), 1), value))


def test_a_step_is_the_mean_of_all_that_make_it_up() -> None:
    steps = CollectedSteps()
    steps.add(0, 2, 7, dense(1.0, 2.0))
    steps.expect(0, 2)
    assert steps.take() is None
    steps.add(0, 2, 7, None)  # comes twice
    assert steps.take() is None
    steps.add(1, 2, 7, dense(9.0, 9.0))  # already in the next step
    steps.add(0, 1, 7, dense(3.0, 2.0))
    means = steps.take()
    assert means is not None
    assert steps.step == 1
    mean = means[7].slices[0]
    assert isinstance(mean, torch.Tensor)
    assert mean.tolist() == [2.0, 2.0]
    assert steps.take() is None
    steps.expect(1, 1)
    later = steps.take()
    assert later is not None
    assert not isinstance(later[7].slices[0], PushedRows)
    assert later[7].slices[0].tolist() == [9.0, 9.0]


def test_memory_of_sums_is_used_again_but_not_while_it_is_read() -> None:
    steps = CollectedSteps()
    addresses = []
    for step in range(4):
        steps.add(step, 0, 7, dense(float(step)))
        steps.expect(step, 1)
        means = steps.take()
        assert means is not None
        mean = means[7].slices[0]
        assert isinstance(mean, torch.Tensor)
        assert mean.tolist() == [step]
        addresses.append(mean.data_ptr())
    assert addresses[0] != addresses[1]
    assert len(set(addresses)) == 2


def test_the_memory_of_gradients_may_be_used_again() -> None:
    steps = CollectedSteps()
    gradient, some = torch.ones(2), rows(1)
    steps.add(0, 0, 7, ServerGradients({0: gradient, 1: some}, {5: some}))
    gradient.fill_(torch.nan)
    some.values.fill_(torch.nan)
    steps.expect(0, 1)
    means = steps.take()
    assert means is not None
    kept = means[7].slices
    assert isinstance(kept[0], torch.Tensor)
    assert isinstance(kept[1], PushedRows)
    assert (kept[0].tolist(), kept[1].values.tolist()) == ([1, 1], [[1]])
    assert means[7].tables[5].values.tolist() == [[1]]


def test_who_has_no_gradient_for_a_slice_counts_as_zeros() -> None:
    steps = CollectedSteps()
    steps.add(0, 0, 7, ServerGradients({0: torch.tensor([[4.0], [4.0]])}, {}))
    steps.add(0, 1, 7, ServerGradients({0: rows(1, 1, value=2.0), 1: rows(0)}, {5: rows(3)}))
    steps.add(0, 2, 8, ServerGradients({3: torch.tensor([6.0])}, {}))
    steps.expect(0, 3)
    means = steps.take()
    assert means is not None
    mixed, some, other = means[7].slices[0], means[7].slices[1], means[8].slices[3]
    assert isinstance(mixed, torch.Tensor)
    assert isinstance(some, PushedRows)
    assert isinstance(other, torch.Tensor)
    assert (mixed.tolist(), some.values.tolist(), other.tolist()) == ([[2], [4]], [[0.5]], [6])
    assert means[7].tables[5].values.tolist() == [[0.5]]


def test_nobody_waits_for_the_dead() -> None:
    steps = CollectedSteps()
    steps.add(0, 1, 7, dense(3.0))
    steps.drop(0, 2)
    assert steps.take() is None  # of how many it is nobody has said
    steps.expect(0, 2)
    means = steps.take()
    assert means is not None
    assert not isinstance(means[7].slices[0], PushedRows)
    assert means[7].slices[0].tolist() == [3.0]
    steps.drop(1, 1)
    steps.expect(1, 1)
    assert steps.take() == {}  # all of them died: a step of nothing
    steps.drop(0, 1)
    steps.expect(0, 2)
    assert steps.take() is None
    assert steps.step == 2
