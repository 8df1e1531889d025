"""Crops and boxes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import raydist as rd
from raydist.image.arrays import require_colours, require_image, require_size
from tests.image.samples import PIXELS, picture


def test_images_and_sizes_are_checked() -> None:
    images: list[tuple[Any, str]] = [
        (
            np.zeros((2, 3)),
            r"it needs an array \(height, width, channels\).* got shape \(2, 3\), dtype float64. Add the",
        ),
        (b"\xff\xd8", "got b.* Decode it first"),
        (np.array([[["a"]]], dtype=object), "dtype object"),
    ]
    for image, message in images:
        with pytest.raises(rd.SpecError, match=message):
            require_image(image, "it")
    with pytest.raises(rd.SpecError, match="it needs uint8 or float32, got float64"):
        require_colours(np.zeros((1, 1, 1)), "it")
    sizes: list[Any] = [5.0, (1, 2, 3), (1.5, 2), "ab", None]
    for size in sizes:
        with pytest.raises(rd.InvalidArgumentError, match=r"size of it must be \(height, width\) or one int"):
            require_size(size, "it")
    assert require_size(np.array([2, 3]), "it") == (2, 3)
    assert require_size(np.int64(4), "it") == (4, 4)
    with pytest.raises(rd.InvalidArgumentError, match=r"at least \(1, 1\), got \(0, 3\)"):
        require_size((0, 3), "it")


SIDES = st.integers(1, 12)


def numbered(height: int, width: int) -> np.ndarray:
    return np.arange(height * width * 2).reshape(height, width, 2)


@given(SIDES, SIDES, st.data())
def test_a_random_crop_is_one_of_all_crops_and_the_same_for_the_same_rng(
    height: int, width: int, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    seed = data.draw(st.integers(0, 99))
    image = numbered(height, width)
    crop = rd.image.random_crop(image, (rows, columns), rng=np.random.default_rng(seed))
    top, left = divmod(int(crop[0, 0, 0]) // 2, width)
    assert np.array_equal(crop, image[top : top + rows, left : left + columns])
    assert np.array_equal(crop, rd.image.random_crop(image, (rows, columns), rng=np.random.default_rng(seed)))
    assert crop.base is None


def test_every_place_is_drawn() -> None:
    rng = np.random.default_rng(0)
    corners = [int(rd.image.random_crop(numbered(3, 4), (2, 2), rng=rng)[0, 0, 0]) // 2 for _ in range(300)]
    counts = np.bincount(corners)
    assert set(corners) == {0, 1, 2, 4, 5, 6}
    assert counts[counts > 0].min() > 25


def test_a_random_crop_takes_a_whole_shape_too_and_a_batch_is_cut_alike() -> None:
    def cropped(image: Any, size: Any) -> Any:
        return rd.image.random_crop(image, size, rng=np.random.default_rng(3))

    image = numbered(5, 6)
    crop, crops = cropped(image, (2, 3)), cropped(np.stack([image] * 2), (2, 3))
    assert np.array_equal(crops, np.stack([crop] * 2))
    assert np.array_equal(cropped(image, (2, 3, 2)), crop)
    assert np.array_equal(cropped(image[np.newaxis], [1, 2, 3, 2])[0], crop)
    assert rd.image.central_crop(np.stack([image] * 2), 0.5).shape == (2, 3, 4, 2)
    for source, size in ((image, (2, 3, 1)), (image[np.newaxis], (2, 2, 3, 2))):
        with pytest.raises(rd.InvalidArgumentError, match="size of random_crop must"):
            cropped(source, size)
    for rows, columns in ((6, 1), (1, 7)):
        with pytest.raises(rd.InvalidArgumentError, match=f"image of 5 x 6 pixels, got {rows} x {columns} pixels"):
            cropped(image, (rows, columns))
    for fraction in (0, -1, 1.1):
        with pytest.raises(rd.InvalidArgumentError, match=r"central_fraction must be in \(0, 1\], got"):
            rd.image.central_crop(image, fraction)


@given(SIDES, SIDES, st.floats(0.01, 1))
def test_a_central_crop_is_that_of_tf(height: int, width: int, fraction: float) -> None:
    top, left = int((height - height * fraction) / 2), int((width - width * fraction) / 2)
    expected = numbered(height, width)[top : height - top, left : width - left]
    assert np.array_equal(rd.image.central_crop(numbered(height, width), fraction), expected)


def test_boxes() -> None:
    batch, method = PIXELS[np.newaxis], "cubic"
    assert rd.image.crop_and_resize(batch, np.zeros((0, 4)), [], (2, 3)).shape == (0, 2, 3, 3)
    nowhere = rd.image.crop_and_resize(batch, [[np.nan, 0, 1, 1]], [0], 2, extrapolation_value=7)
    assert (nowhere == 7).all()
    with pytest.raises(rd.SpecError, match=r"needs a batch of images, got shape \(2, 4, 3\)"):
        rd.image.crop_and_resize(PIXELS, [[0, 0, 1, 1]], [0], 2)
    with pytest.raises(rd.InvalidArgumentError, match=r"boxes must have shape \(boxes, 4\)"):
        rd.image.crop_and_resize(batch, [0, 0, 1, 1], [0], 2)
    with pytest.raises(rd.InvalidArgumentError, match=r"box_indices must be numbers of the 1 images, got \[1\]"):
        rd.image.crop_and_resize(batch, [[0, 0, 1, 1]], [1], 2)
    with pytest.raises(rd.InvalidArgumentError, match="method of crop_and_resize"):
        rd.image.crop_and_resize(batch, [[0, 0, 1, 1]], [0], 2, method)  # type: ignore[arg-type]  # the point


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


def test_random_flips_do_so_half_of_the_time() -> None:
    image = np.arange(12).reshape(2, 2, 3)
    pairs: list[tuple[Any, Any]] = [
        (rd.image.random_flip_left_right, rd.image.flip_left_right),
        (rd.image.random_flip_up_down, rd.image.flip_up_down),
    ]
    for maybe, flip in pairs:
        rng = np.random.default_rng(0)
        flipped = [np.array_equal(maybe(image, rng=rng), flip(image)) for _ in range(200)]
        assert 70 < sum(flipped) < 130
        batch = maybe(np.stack([image] * 200), rng=np.random.default_rng(0))
        for one, was in zip(batch, flipped, strict=True):
            assert np.array_equal(one, flip(image) if was else image)


def test_a_batch_is_its_images() -> None:
    batch = np.stack([PIXELS, PIXELS[::-1]])
    for turn in (rd.image.rot90, rd.image.transpose):
        assert np.array_equal(turn(batch), np.stack([turn(image) for image in batch]))
        assert turn(PIXELS).base is None
        assert turn(PIXELS).flags.c_contiguous
    for size in ((1, 2), (2, 3), (3, 5), (7, 4)):
        for change in (rd.image.resize_with_crop_or_pad, rd.image.resize_with_pad):
            assert np.array_equal(change(batch, *size), np.stack([change(image, *size) for image in batch])), size


@given(SIDES, SIDES, SIDES, SIDES, st.integers(1, 5))
def test_nearest_takes_the_pixel_at_the_centre_and_bilinear_weighs_by_distance(
    height: int, width: int, rows: int, columns: int, channels: int
) -> None:
    image = picture(height, width, channels)
    down = [math.floor((row + 0.5) * height / rows) for row in range(rows)]
    across = [math.floor((column + 0.5) * width / columns) for column in range(columns)]
    assert np.array_equal(rd.image.resize(image, (rows, columns), "nearest"), image[down][:, across])
    expected = np.einsum("yh,xw,hwc->yxc", triangles(height, rows), triangles(width, columns), image)
    assert np.allclose(rd.image.resize(image.astype(np.float32), (rows, columns)), expected, atol=1e-3)
    assert np.abs(rd.image.resize(image, (rows, columns)) - expected).max() <= 1.5


def triangles(old: int, new: int) -> np.ndarray:
    """Weight of every old pixel in every new one: a triangle around its centre, at least as wide as it."""
    scale = old / new
    distances = np.abs(np.add.outer((np.arange(new) + 0.5) * scale, -(np.arange(old) + 0.5)))
    weights = np.clip(1 - distances / max(scale, 1), 0, None)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def test_rgb_is_that_of_pillow() -> None:
    names: dict[Any, str] = {"bilinear": "BILINEAR", "area": "BOX", "bicubic": "BICUBIC", "lanczos": "LANCZOS"}
    for method, name in names.items():
        expected = PIL.Image.fromarray(picture()).resize((20, 60), getattr(PIL.Image.Resampling, name))
        assert np.array_equal(rd.image.resize(picture(), (60, 20), method), np.asarray(expected)), method


def test_channels_do_not_mix_and_batches_are_their_images() -> None:
    for channels, dtype in itertools.product((1, 2, 3, 4, 5), (np.uint8, np.float32)):
        image = picture(channels=channels).astype(dtype)
        resized = rd.image.resize(image, (9, 11))
        assert resized.shape == (9, 11, channels)
        assert resized.dtype == dtype
        for channel in range(channels):
            alone = rd.image.resize(image[..., channel : channel + 1], (9, 11))
            assert np.array_equal(resized[..., channel : channel + 1], alone), (channels, dtype)
        batch = rd.image.resize(np.stack([image, image[::-1]]), (9, 11))
        assert np.array_equal(batch, np.stack([resized, rd.image.resize(image[::-1], (9, 11))])), (channels, dtype)
        kept = rd.image.resize(image, image.shape[:2])
        assert np.array_equal(kept, image)
        assert not np.shares_memory(kept, image)


def test_arguments_of_resizing_are_checked() -> None:
    empty = PIXELS[:0]
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (rd.image.resize, (PIXELS, (2, 2), "cubic"), "one of nearest, bilinear, area, bicubic, lanczos, got 'cubic'"),
        (rd.image.resize, (empty, (2, 2)), r"image with pixels, got shape \(0, 4, 3\)"),
        (rd.image.resize, (PIXELS, (2, 0)), r"size of resize must be at least \(1, 1\), got \(2, 0\)"),
        (rd.image.pad_to_bounding_box, (PIXELS, 2, 0, 3, 4), "2 x 4 pixels must fit into 3 x 4 at row 2, column 0"),
        (rd.image.pad_to_bounding_box, (PIXELS, -1, 0, 3, 4), "at row -1"),
        (rd.image.resize_with_crop_or_pad, (PIXELS, 0, 4), r"at least \(1, 1\), got \(0, 4\)"),
        (rd.image.resize_with_pad, (empty, 2, 2), "needs an image with pixels"),
        (rd.image.resize_with_pad, (PIXELS, 1, 1), r"at least \(1, 1\), got \(0, 1\)"),  # half a row would be left
    ]
    for function, arguments, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            function(*arguments)


def test_an_image_keeps_its_proportions() -> None:
    padded = rd.image.resize_with_pad(np.full((20, 10, 1), 9, np.uint8), 10, 11)
    assert (padded.any(axis=(0, 2)).sum(), padded.any(axis=(1, 2)).sum()) == (5, 10)
    assert picture(7, 5).dtype == rd.image.resize_with_pad(picture(7, 5), 14, 14).dtype
