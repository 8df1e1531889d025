"""The order of a cycle of slots, against the algorithm written down element by element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import raydist as rd


def visited(lengths: list[int], cycle: int, block: int) -> list[int]:
    """Go round the slots; each hands out up to `block`; an empty one takes the next input when it is visited."""
    inputs = iter([iter([1000 * number + i for i in range(length)]) for number, length in enumerate(lengths)])
    slots: list[object] = [None] * cycle
    out: list[int] = []
    ended = False
    while not (ended and all(slot is None for slot in slots)):
        for place in range(cycle):
            if slots[place] is None:
                slots[place] = next(inputs, None)
                ended = ended or slots[place] is None
            for _ in range(block if slots[place] is not None else 0):
                value = next(slots[place], None)  # type: ignore[call-overload]
                if value is None:
                    slots[place] = None
                    break
                out.append(value)
    return out


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 4), st.integers(1, 3))
def test_order(lengths: list[int], cycle: int, block: int) -> None:
    numbers = rd.Dataset.range(len(lengths))
    dataset = numbers.interleave(
        lambda i: rd.Dataset.range(1000 * int(i), 1000 * int(i) + lengths[int(i)]),
        cycle_length=cycle,
        block_length=block,
    )
    assert [int(x) for x in dataset] == visited(lengths, cycle, block)
