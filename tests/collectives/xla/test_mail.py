from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from raydist.collectives.xla.mail import Arrival, Parcel
from raydist.errors import CollectiveMismatchError


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore("g/0", HashStore())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_message_arrives_as_it_was_sent(store: PrefixStore, dtype: torch.dtype) -> None:
    sent = torch.arange(6).reshape(2, 3).to(dtype)
    parcel, received = Parcel(store, 0, 1, 0, sent), torch.zeros(2, 3, dtype=dtype)
    assert parcel.landed()
    assert Arrival(store, 0, 1, 0, received).wait_slice(0.0)
    assert torch.equal(received, sent)


def test_a_message_waits_until_the_one_before_it_is_taken(store: PrefixStore) -> None:
    first, second = Parcel(store, 0, 1, 0, torch.ones(1)), Parcel(store, 0, 1, 1, torch.zeros(0))
    assert first.landed()
    assert not second.wait_slice(0.01)
    arrivals = [Arrival(store, 0, 1, 0, torch.zeros(1)), Arrival(store, 0, 1, 1, torch.zeros(0))]
    assert not arrivals[1].wait_slice(0.01)
    assert arrivals[0].wait_slice(0.0)
    assert second.wait_slice(0.0)
    assert arrivals[1].wait_slice(0.0)
    assert not Arrival(store, 1, 0, 0, torch.zeros(1)).wait_slice(0.0)  # nobody sent anything the other way


def test_another_shape_is_an_error_of_the_receiver_and_is_taken(store: PrefixStore) -> None:
    Parcel(store, 0, 1, 0, torch.ones(2))
    with pytest.raises(CollectiveMismatchError, match=r"torch.float32 \(3,\) on rank 1 for torch.float32 \(2,\) from"):
        Arrival(store, 0, 1, 0, torch.zeros(3)).wait_slice(0.0)
    assert Parcel(store, 0, 1, 1, torch.ones(1)).landed()
