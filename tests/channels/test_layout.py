from __future__ import annotations

import itertools

import pytest

from raydist.channels.layout import MESSAGE_BYTES, MESSAGES_UNDER_WAY, ChannelLayout


@pytest.mark.parametrize("num_ends", [1, 3, 200])
def test_nothing_overlaps(num_ends: int) -> None:
    layout = ChannelLayout(num_ends)
    places = [(0, 32)]
    places += [(layout.bell(member), 4) for member in range(1 + num_ends)]
    for end, inward in itertools.product(range(num_ends), (False, True)):
        ring = layout.ring(end, inward=inward)
        places += [(ring, 8), (ring + layout.taken(), 8)]
        places += [(ring + layout.slot(number), 8 + MESSAGE_BYTES) for number in range(MESSAGES_UNDER_WAY)]
    places.sort()
    for (start, length), (following, _) in itertools.pairwise(places):
        assert start + length <= following
    assert sum(places[-1]) <= layout.size


def test_slots_are_used_in_turn() -> None:
    assert ChannelLayout.slot(0) == ChannelLayout.slot(MESSAGES_UNDER_WAY) != ChannelLayout.slot(1)
