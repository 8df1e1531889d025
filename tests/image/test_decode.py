from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import raydist as rd
from tests.image.samples import encode, picture


@pytest.mark.parametrize(("kind", "decode"), [("JPEG", rd.image.decode_jpeg), ("PNG", rd.image.decode_png)])
def test_the_format_is_found_by_the_first_bytes(kind: str, decode: object) -> None:
    data = encode(picture(), kind)
    assert np.array_equal(rd.image.decode_image(data), decode(data))  # type: ignore[operator]  # one of two functions
    assert rd.image.decode_image(data, channels=1).shape == (37, 53, 1)
    assert rd.image.image_shape(data) == (37, 53, 3)
    with pytest.raises(rd.InvalidArgumentError, match="max_pixels=9 pixels"):
        rd.image.decode_image(data, max_pixels=9)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_decode_and_random_crop_is_decode_then_random_crop(kind: str) -> None:
    data = encode(picture(), kind)
    for seed in range(20):
        expected = rd.image.random_crop(rd.image.decode_image(data, 3), (20, 30), rng=np.random.default_rng(seed))
        cropped = rd.image.decode_and_random_crop(data, (20, 30), 3, rng=np.random.default_rng(seed))
        assert np.array_equal(cropped, expected)
    assert rd.image.decode_and_random_crop(data, 9, rng=np.random.default_rng(0)).shape == (9, 9, 3)
    with pytest.raises(rd.InvalidArgumentError, match="image of 37 x 53 pixels, got 38 x 38 pixels"):
        rd.image.decode_and_random_crop(data, 38, rng=np.random.default_rng(0))


@pytest.mark.parametrize("data", [b"", b"GIF89a...", b"\xff\xd8"])
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(
        rd.InvalidArgumentError, match=f"must be a JPEG or a PNG, got {len(data)} bytes that begin with"
    ):
        rd.image.decode_image(data)


def test_files_become_batches_and_a_bad_one_an_error_in_its_place(tmp_path: Path) -> None:
    for number in range(5):
        data = encode(picture(40 + number, 50), "PNG" if number == 1 else "JPEG")
        (tmp_path / f"{number}.img").write_bytes(data[:100] if number == 3 else data)

    def load(path: str, *, rng: np.random.Generator) -> np.ndarray:
        image = rd.image.decode_image(rd.image.read_file(path), channels=3)
        image = rd.image.random_flip_left_right(rd.image.random_crop(image, (32, 32), rng=rng), rng=rng)
        return rd.image.normalize(image, mean=0.5, std=0.5)

    files = rd.Dataset.list_files(str(tmp_path / "*.img"), shuffle=False)
    images = files.map(load, num_parallel_calls=2, seed=1)
    again = files.map(load, seed=1).ignore_errors()
    iterator = images.as_numpy_iterator()
    got = [next(iterator) for _ in range(3)]
    with pytest.raises(rd.DataLossError, match="whole JPEG image, got 100 bytes") as caught:
        next(iterator)
    assert "element 3 of its input" in "".join(caught.value.__notes__)
    got.append(next(iterator))
    assert np.array_equal(np.stack(got), np.stack(list(again.as_numpy_iterator())))
    assert got[0].shape == (32, 32, 3)
