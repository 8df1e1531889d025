from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.collectives.shared_memory import layout as places
from raydist.collectives.shared_memory.layout import Layout, cut, pieces


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_nothing_overlaps(world_size: int) -> None:
    layout = Layout.of(world_size)
    ranks = range(world_size)
    used = [(0, 1 + world_size)]  # proof; locks
    used += [(layout.words(rank), places.WORDS_A_RANK * 8) for rank in ranks]
    used += [(layout.failure(rank), places.FAILURE_BYTES) for rank in ranks]
    calls = [(layout.call(rank, number), places.CALL_BYTES) for rank in ranks for number in range(places.NUM_SLOTS)]
    slot_bytes = layout.contribution_bytes
    used += calls + [(layout.slot(rank, number), slot_bytes) for rank in ranks for number in range(places.NUM_SLOTS)]
    buffers = [layout.staging(rank, buffer) for rank in ranks for buffer in range(places.NUM_BUFFERS)]
    used += [(buffer, layout.chunk_bytes * world_size) for buffer in buffers]
    used += [(layout.mail_words(a, b), 128) for a in ranks for b in ranks]
    used += [(layout.mail(a, b, half), layout.mail_bytes) for a in ranks for b in ranks for half in (0, 1)]
    if layout.bay_bytes:
        used += [(layout.bay(rank, number), layout.bay_bytes) for rank in ranks for number in range(places.NUM_BAYS)]
        sums = [layout.subtotal(group, bay) for group in range(layout.num_groups) for bay in range(places.NUM_BAYS)]
        sums += [layout.total(bay) for bay in range(places.NUM_BAYS)]
        used += [(begin - 64, 64 + 2 * layout.bay_bytes) for begin in sums]
    used.sort()
    assert all(start + length <= after for (start, length), (after, _) in zip(used, used[1:], strict=False))
    assert sum(used[-1]) <= layout.size
    assert all(start % 64 == 0 for start, _ in used)


def test_slots_are_used_in_turn() -> None:
    layout = Layout.of(2)
    assert layout.slot(1, 3) == layout.slot(1, 3 + places.NUM_SLOTS) != layout.slot(1, 4)


def test_calls_of_one_collective_lie_side_by_side() -> None:
    layout = Layout.of(3)
    begins = [layout.call(rank, 5 + places.NUM_SLOTS) for rank in range(3)]
    assert begins == [layout.call(0, 5) + rank * places.CALL_BYTES for rank in range(3)]


def test_a_segment_fits_the_64_megabytes_of_a_container() -> None:
    assert max(Layout.of(world_size).size for world_size in range(1, 9)) <= 64 << 20


@given(numel=st.integers(0, 5000), itemsize=st.sampled_from([1, 2, 4, 8, 16]), world_size=st.integers(1, 6))
def test_windows_cover_a_tensor_once(numel: int, itemsize: int, world_size: int) -> None:
    windows = cut(numel, itemsize, chunk_bytes=512, world_size=world_size)
    covered: list[int] = []
    for window in windows:
        for rank in range(world_size):
            start, count = window.slice_of(rank)
            assert count * itemsize <= 512
            covered += range(start, start + count)
    assert covered == list(range(numel))
    assert len(windows) <= numel * itemsize // (512 * world_size) + 1


@given(num_bytes=st.integers(0, 1000), most=st.integers(1, 99))
def test_pieces_cover_a_message_once(num_bytes: int, most: int) -> None:
    found = pieces(num_bytes, most)
    assert [byte for start, length in found for byte in range(start, start + length)] == list(range(num_bytes))
    assert found
    assert max(length for _, length in found) <= most
