from __future__ import annotations

import pytest

from raydist.collectives.base import Membership
from raydist.collectives.hierarchical import windows
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.hierarchical.windows import BlockWindows


def windows_of(hosts: str) -> list[BlockWindows]:
    """As each rank sees them."""
    plans = [
        HostPlan.of(Membership("g", 0, rank=rank, world_size=len(hosts), hosts=tuple(hosts)))
        for rank in range(len(hosts))
    ]
    return [BlockWindows(plan) for plan in plans]


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abbb", "aaaaaaaabb"])
def test_all_ranks_cut_alike_whatever_their_host_has(hosts: str) -> None:
    first, *others = [known.of(10_000_001, 4) for known in windows_of(hosts)]
    assert all(cut == first for cut in others)
    assert first[0].start == 0
    assert all(before.stop == after.start for before, after in zip(first, first[1:], strict=False))
    assert first[-1].stop == 10_000_001


def test_large_tensors_have_larger_blocks_among_many_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_MOST_BLOCK", 4096)
    monkeypatch.setattr(windows, "_LARGE_BLOCK", 8192)
    (first, *_) = windows_of("aabbcc")
    assert first.most_bytes == 8192
    enough = 16 * 2 * 8192 // 8
    assert max(window.step for window in first.of(enough - 1, 8)) * 8 == 4096
    assert [window.step * 8 for window in first.of(enough, 8)] == [8192] * 16
    assert first.of(0, 8) == []
    (first, *_) = windows_of("aabb")
    assert first.most_bytes == 4096
    assert [window.step * 8 for window in first.of(enough, 8)] == [4096] * 32
