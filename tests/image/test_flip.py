from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import raydist as rd

IMAGES = arrays.arrays(
    st.sampled_from([np.uint8, np.float32]), st.tuples(*[st.integers(0, 5)] * 2, st.integers(1, 4)), elements=st.just(1)
).map(lambda image: (np.arange(image.size).reshape(image.shape)).astype(image.dtype))


@given(IMAGES)
def test_flips_are_python_reversals_and_their_own_inverses(image: np.ndarray) -> None:
    assert rd.image.flip_left_right(image).tolist() == [row[::-1] for row in image.tolist()]
    assert rd.image.flip_up_down(image).tolist() == image.tolist()[::-1]
    for flip in (rd.image.flip_left_right, rd.image.flip_up_down):
        assert np.array_equal(flip(flip(image)), image)
        assert flip(image).dtype == image.dtype
        assert np.array_equal(flip(np.stack([image, image]))[1], flip(image))
        assert not np.shares_memory(flip(image), image)


@pytest.mark.parametrize(
    ("maybe", "flip"),
    [
        (rd.image.random_flip_left_right, rd.image.flip_left_right),
        (rd.image.random_flip_up_down, rd.image.flip_up_down),
    ],
)
def test_random_flips_do_so_half_of_the_time(maybe: object, flip: object) -> None:
    image = np.arange(12).reshape(2, 2, 3)
    rng = np.random.default_rng(0)
    flipped = [np.array_equal(maybe(image, rng=rng), flip(image)) for _ in range(200)]  # type: ignore[operator]
    assert 70 < sum(flipped) < 130
    batch = maybe(np.stack([image] * 200), rng=np.random.default_rng(0))  # type: ignore[operator]  # a function
    assert [np.array_equal(one, flip(image)) for one in batch] == flipped  # type: ignore[operator]  # a function
    assert all(np.array_equal(one, image) for one, was in zip(batch, flipped, strict=True) if not was)
