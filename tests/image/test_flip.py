"""Flipping and turning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import raydist as rd
from tests.image.tensorflow_values import PIXELS, check_call, values_of

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


@pytest.mark.parametrize("row", values_of("rot90", "transpose"), ids=lambda row: str(row["call"]))
def test_as_in_tensorflow(row: dict[str, Any]) -> None:
    check_call(row)


@pytest.mark.parametrize("turn", [rd.image.rot90, rd.image.transpose])
def test_results_are_copies_and_a_batch_is_its_images(turn: Any) -> None:
    batch = np.stack([PIXELS, PIXELS[::-1]])
    assert np.array_equal(turn(batch), np.stack([turn(image) for image in batch]))
    result = turn(PIXELS)
    assert result.base is None
    assert result.flags.c_contiguous


def test_k_is_a_whole_number() -> None:
    assert np.array_equal(rd.image.rot90(PIXELS, 4), PIXELS)
    with pytest.raises(TypeError, match="float"):
        rd.image.rot90(PIXELS, 1.5)  # type: ignore[arg-type]  # the point of this test
