from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

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
    one = VariableShard.create([16, 100_000, 0])
    other = VariableShard.open(one.address)
    one.unlink()
    return one, other


Pair = tuple[VariableShard, VariableShard]


def test_what_is_written_in_the_shared_view_all_see(pair: Pair) -> None:
    one, other = pair
    with one.writing():
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
    before = one.version
    other.publish_own()
    assert one.shared(1)[:7].tolist() == [0, 0, 0, 0, 0, 9, 0]
    assert one.shared(0).tolist() == [1] * 16
    assert one.version == before + 2
    assert other.own_ranges() == []


def test_the_version_is_odd_while_somebody_writes(pair: Pair) -> None:
    one, other = pair
    assert other.version == 0
    with one.writing():
        assert other.version == 1
    assert other.version == 2
    with pytest.raises(KeyError), one.writing():
        raise KeyError
    assert other.version == 4


def test_a_snapshot_is_never_torn(pair: Pair) -> None:
    one, other = pair
    stop = threading.Event()

    def write() -> None:
        value = 0
        while not stop.wait(0.001):
            value = (value + 1) % 100
            with one.writing():
                one.shared(1)[:50_000] = value
                one.shared(1)[50_000:] = value

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            version, (_, copy, _) = other.snapshot(timeout_s=10)
            assert version % 2 == 0
            assert len(set(copy.tolist())) == 1
    finally:
        stop.set()
        writer.join()


def test_a_snapshot_does_not_wait_for_ever(pair: Pair) -> None:
    one, other = pair
    with one.writing(), pytest.raises(rd.DeadlineExceededError, match=r"again and again for 0.05 s"):
        other.snapshot(timeout_s=0.05)


def test_the_memory_has_no_name_and_stays_with_its_tensors() -> None:
    shard = VariableShard.create([8])
    path = Path("/dev/shm") / shard.address.name  # where it must not be
    assert path.exists()
    shard.unlink()
    shard.unlink()
    assert not path.exists()
    tensor = shard.shared(0)
    shard.close()
    shard.close()
    del shard
    assert tensor.fill_(4).tolist() == [4] * 8


def _no_room() -> VariableShard:
    return VariableShard.create([1 << 60])


def _no_file() -> VariableShard:
    return VariableShard.open(ShardAddress("raydist-shm-none", b"", (8,)))


@pytest.mark.parametrize(
    ("make", "message"),
    [(_no_room, r"must fit into the host's shared memory"), (_no_file, r"raydist-shm-none there cannot be opened")],
)
def test_errors_say_what_to_do(make: Callable[[], VariableShard], message: str) -> None:
    with pytest.raises(rd.UnavailableError, match=message):
        make()


def test_a_file_of_somebody_else_is_refused() -> None:
    shard = VariableShard.create([8])
    address = ShardAddress(shard.address.name, b"x" * 32, (8,))
    with pytest.raises(rd.UnavailableError, match="a file of somebody else"):
        VariableShard.open(address)
    shard.unlink()
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
