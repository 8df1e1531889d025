from __future__ import annotations

import pytest
import torch

import raydist as rd
from raydist.storage import shard as module
from raydist.storage.shard import ShardAddress, VariableShard


@pytest.fixture(params=["kernel tells", "compared"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[VariableShard, VariableShard]:
    """Two ends of a shard of three variables."""
    if request.param == "compared":
        monkeypatch.setattr(module, "written_ranges", lambda address, num_bytes: None)
    one = VariableShard.create_nameless([16, 100_000, 0])
    return one, VariableShard.open(one.address)


Pair = tuple[VariableShard, VariableShard]


def test_what_is_written_in_the_shared_view_all_see(pair: Pair) -> None:
    one, other = pair
    one.shared(1).fill_(3)
    assert other.shared(1).tolist() == [3] * 100_000
    assert other.own(1).tolist() == [3] * 100_000
    assert other.own_ranges() == []
    assert one.shared(2).tolist() == other.own(2).tolist() == []


def test_what_is_written_in_the_own_view_nobody_else_sees(pair: Pair) -> None:
    one, other = pair
    other.own(1)[70_000] = 5
    assert one.shared(1)[70_000] == one.own(1)[70_000] == other.shared(1)[70_000] == 0
    offset = other.layout.offsets[1] + 70_000
    assert any(begin <= offset < end for begin, end in other.own_ranges())
    other.drop_own()
    assert other.own(1)[70_000] == 0
    assert other.own_ranges() == []


def test_what_was_published_all_see(pair: Pair) -> None:
    one, other = pair
    one.shared(0).fill_(1)
    other.own(1)[5] = 9
    other.publish_own()
    assert one.shared(1)[:7].tolist() == [0, 0, 0, 0, 0, 9, 0]
    assert one.shared(0).tolist() == [1] * 16
    assert other.own_ranges() == []


def test_the_memory_stays_with_its_tensors() -> None:
    shard = VariableShard.create_nameless([8])
    tensor = shard.shared(0)
    shard.close()
    shard.close()
    del shard
    assert tensor.fill_(4).tolist() == [4] * 8


def test_a_missing_file_is_told() -> None:
    with pytest.raises(rd.UnavailableError, match=r"raydist-shm-none there cannot be opened"):
        VariableShard.open(ShardAddress("raydist-shm-none", b"", (8,)))


def test_a_file_of_somebody_else_is_refused() -> None:
    shard = VariableShard.create_nameless([8])
    address = ShardAddress(shard.address.name, b"x" * 32, (8,))
    with pytest.raises(rd.UnavailableError, match="a file of somebody else"):
        VariableShard.open(address)
    assert torch.equal(shard.shared(0), torch.zeros(8, dtype=torch.uint8))


def test_a_shard_without_a_name() -> None:
    one = VariableShard.create_nameless([16, 0])
    other = VariableShard.open(one.address)
    one.shared(0).fill_(3)
    assert other.shared(0).tolist() == other.own(0).tolist() == [3] * 16
    one.close()
    with pytest.raises(rd.UnavailableError, match="cannot be opened"):
        VariableShard.open(one.address)
    other.close()


def test_a_shard_without_a_name_that_is_too_large() -> None:
    with pytest.raises(
        rd.UnavailableError, match=r"must fit into the host's memory, which gave none: 1,152,.* are wanted"
    ):
        VariableShard.create_nameless([1 << 60])  # asked of the kernel, it would kill processes for it
