from __future__ import annotations

import numpy as np
import pytest

import raydist as rd
from raydist.image.arrays import require_colours, require_image, require_size


@pytest.mark.parametrize("shape", [(2, 3, 1), (4, 2, 3, 3)])
def test_images_and_batches_pass(shape: tuple[int, ...]) -> None:
    image = np.zeros(shape, np.uint8)
    assert require_image(image, "it") is image
    assert require_colours(image, "it") is image


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((2, 3)), r"needs an array \(height, width, channels\).* got shape \(2, 3\), dtype float64. Add the"),
        (b"\xff\xd8", "got b.* Decode it first"),
        (np.array([[["a"]]], dtype=object), "dtype object"),
    ],
)
def test_other_things_are_named(image: object, message: str) -> None:
    with pytest.raises(rd.SpecError, match=f"it {message}" if message.startswith("needs") else message):
        require_image(image, "it")


def test_colours_are_uint8_or_float32() -> None:
    with pytest.raises(rd.SpecError, match="it needs uint8 or float32, got float64"):
        require_colours(np.zeros((1, 1, 1)), "it")


@pytest.mark.parametrize("size", [5.0, (1, 2, 3), (1.5, 2), "ab", None])
def test_a_size_is_a_pair(size: object) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"size of it must be \(height, width\) or one int"):
        require_size(size, "it")


def test_a_size_is_positive() -> None:
    assert require_size(np.array([2, 3]), "it") == (2, 3)
    assert require_size(np.int64(4), "it") == (4, 4)
    with pytest.raises(rd.InvalidArgumentError, match=r"at least \(1, 1\), got \(0, 3\)"):
        require_size((0, 3), "it")
