from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from raydist.collectives.reducer.parameter_hooks import TrainedParameters


class Listener:
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.parameters = TrainedParameters(self.stray)

    def stray(self, index: int, parameter: torch.nn.Parameter) -> None:
        assert parameter is self.parameters.all[index]
        self.heard.append(index)


def seen(listener: Listener) -> tuple[int, ...]:
    listener.parameters.look()
    return listener.parameters.indices


def three() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1)) for _ in range(3)]


def test_only_those_that_are_trained_are_looked_at() -> None:
    listener, (a, b, c) = Listener(), three()
    b.requires_grad_(False)
    listener.parameters.attach([a, b])
    listener.parameters.attach((a, b, c))
    assert listener.parameters.all == {0: a, 1: b, 2: c}
    assert seen(listener) == (0, 2)
    (a * b * c).sum().backward()
    assert sorted(listener.heard) == [0, 2]
    b.requires_grad_(True)
    assert seen(listener) == (0, 1, 2)
    assert listener.parameters.trained == (a, b, c)
    (a * b * c).sum().backward()
    assert sorted(listener.heard) == [0, 0, 1, 2, 2]


def test_a_list_may_have_grown() -> None:
    listener, parameters = Listener(), three()
    growing = parameters[:1]
    listener.parameters.attach(growing)
    growing.append(parameters[1])
    listener.parameters.attach(growing)
    assert seen(listener) == (0, 1)


def test_those_that_are_given_no_more_are_let_go_and_their_numbers_not_used_again() -> None:
    listener, (a, b, c) = Listener(), three()
    listener.parameters.attach((a, b))
    listener.parameters.attach((b, c))
    assert (listener.parameters.all, seen(listener)) == ({1: b, 2: c}, (1, 2))
    (a * b * c).sum().backward()
    assert sorted(listener.heard) == [1, 2]


def test_one_that_was_cast_or_resized_is_of_another_kind() -> None:
    listener, (a, b, c) = Listener(), three()
    listener.parameters.attach((a, b, c))
    kinds = [(number, torch.float32, torch.Size([1])) for number in range(3)]
    assert listener.parameters.kinds == tuple(kinds)
    a.data = a.data.double()
    c.data = torch.ones(2)
    assert seen(listener) == (0, 1, 2)
    changed = (0, torch.float64, torch.Size([1])), kinds[1], (2, torch.float32, torch.Size([2]))
    assert listener.parameters.kinds == changed
    assert listener.parameters.trained == (a, b, c)
    (a.sum() + b.sum() + c.sum()).backward()
    assert sorted(listener.heard) == [0, 1, 2]


def test_hooks_go_and_keep_nothing_alive() -> None:
    listener, (a, b, c) = Listener(), three()
    listener.parameters.attach((a, b, c))
    listener.parameters.look()
    listener.parameters.close()
    listener.parameters.close()
    (a * b * c).sum().backward()
    assert (listener.heard, seen(listener)) == ([], ())
    listener.parameters.attach((a,))
    listener.parameters.look()
    reference = weakref.ref(listener)
    del listener
    gc.collect()
    assert reference() is None
    (a * 2).sum().backward()


def test_a_receiver_takes_gradients_out_of_the_parameters() -> None:
    listener, (a, b, _) = Listener(), three()
    received = []
    listener.parameters.attach((a, b))
    listener.parameters.look()
    listener.parameters.sink.receiver = lambda index, gradient: received.append((index, gradient.item()))
    assert listener.parameters.sink.receiver is not None
    (2 * a + 3 * b).sum().backward()
    listener.parameters.sink.receiver = None
    assert (sorted(received), listener.heard) == ([(0, 2.0), (1, 3.0)], [])
    assert (a.grad, b.grad) == (None, None)
