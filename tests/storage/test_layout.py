from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raydist.storage.layout import FIRST_BYTE, ShardLayout


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_variables_are_aligned_and_apart(sizes: list[int]) -> None:
    layout = ShardLayout.of(sizes)
    ends = [FIRST_BYTE, *(offset + size for offset, size in zip(layout.offsets, layout.sizes, strict=True))]
    assert all(offset % 64 == 0 for offset in layout.offsets)
    assert all(end <= offset for end, offset in zip(ends, layout.offsets, strict=False))
    assert layout.num_bytes >= ends[-1]
