"""The state that only one replica has: generators and tensors of every kind come back."""

from __future__ import annotations

import random

import numpy as np
import torch

from raydist.replicas.own_state import HostGenerators, PackedTensors, restore_generators


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_generators_go_back_to_every_state_that_was_packed() -> None:
    generators, states, seen = HostGenerators(), [], []
    for number in range(40):
        states.append(generators.pack())
        assert generators.pack() == states[-1]
        seen.append(draws()[: 1 + number % 5])
        if number % 9 == 0:
            random.seed(number)
            np.random.seed(number)
        if number % 3 == 0:
            np.random.randn()  # leaves a second number behind, which changes nothing else
    for number in (39, 3, 20, 0):
        restore_generators(states[number])
        assert draws()[: 1 + number % 5] == seen[number]


def test_only_the_second_half_of_a_pair_of_numbers_is_a_change() -> None:
    generators = HostGenerators()
    np.random.randn()
    first = generators.pack()
    expected = np.random.randn()
    second = generators.pack()
    np.random.randn()
    restore_generators(first)
    assert np.random.randn() == expected
    assert second != first


def test_tensors_of_every_kind_are_unpacked_as_they_were() -> None:
    tensors = {
        1: torch.arange(10.0).reshape(5, 2)[:1, 1],  # contiguous, with a stride of 2
        2: torch.arange(6).reshape(2, 3).t(),
        3: torch.tensor(True),
        4: torch.zeros(0, 3, dtype=torch.bfloat16),
        5: torch.tensor([1 + 2j, 3 - 1j]).conj(),
        6: torch.eye(3).to_sparse(),
    }
    found = PackedTensors.of(tensors).unpack()
    assert found.keys() == tensors.keys()
    for handle, tensor in tensors.items():
        assert found[handle].dtype == tensor.dtype
        assert torch.equal(found[handle].to_dense(), tensor.to_dense())
