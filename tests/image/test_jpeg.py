from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from tests.image.samples import by_pillow, encode, picture


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_pixels_are_those_of_libjpeg(subsampling: int, progressive: bool) -> None:
    data = encode(picture(), quality=85, subsampling=subsampling, progressive=progressive)
    assert np.array_equal(rd.image.decode_jpeg(data), by_pillow(data, "RGB"))


def test_channels_are_as_stored_or_converted() -> None:
    grey, colour = encode(picture(channels=1)), encode(picture())
    assert rd.image.decode_jpeg(grey).shape == rd.image.decode_jpeg(colour, channels=1).shape == (37, 53, 1)
    assert np.array_equal(rd.image.decode_jpeg(grey), by_pillow(grey, "L"))
    assert np.array_equal(rd.image.decode_jpeg(grey, channels=3), np.repeat(by_pillow(grey, "L"), 3, axis=2))


def test_cmyk_becomes_rgb() -> None:
    data = encode(picture(), mode="CMYK", quality=100, subsampling=0)
    # Pillow writes CMYK inverted, as Adobe does; conversions round a few times.
    difference = rd.image.decode_jpeg(data).astype(int) - by_pillow(data, "RGB")
    assert rd.image.image_shape(data) == (37, 53, 3)
    assert np.abs(difference).max() <= 12


@given(st.data())
def test_decode_and_crop_is_decode_then_crop(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    encoded = encode(picture(height, width))
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    window = (top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left)))
    expected = rd.image.crop_to_bounding_box(rd.image.decode_jpeg(encoded), *window)
    cropped = rd.image.decode_and_crop_jpeg(encoded, window)
    assert np.array_equal(cropped, expected)
    assert cropped.base is None  # the whole image is not kept


@pytest.mark.parametrize("window", [(0, 0, 38, 1), (30, 0, 8, 1), (0, 50, 1, 4), (-1, 0, 2, 2), (0, 0, 0, 3)])
def test_a_window_outside_is_an_error_with_sizes(window: tuple[int, int, int, int]) -> None:
    with pytest.raises(
        rd.InvalidArgumentError, match=rf"inside of the image of 37 x 53 .* got {window[2]} x {window[3]}"
    ):
        rd.image.decode_and_crop_jpeg(encode(picture())[:-9], window)  # found before the damage is


def damaged() -> list[bytes]:
    whole = encode(picture(), quality=85)
    return [b"", whole[:20], whole[:400], whole[: len(whole) // 2], whole[:-2], b"\xff\xd8\xff", b"\0" * 100]


@pytest.mark.parametrize("data", damaged(), ids=len)
def test_damaged_data_is_an_error_with_its_size(data: bytes) -> None:
    with pytest.raises(rd.DataLossError, match=f"must be a whole JPEG image, got {len(data)} bytes"):
        rd.image.decode_jpeg(data)


def test_what_is_left_of_a_truncated_image_can_be_had() -> None:
    whole = encode(picture(200, 200), quality=85)
    image = rd.image.decode_jpeg(whole[: len(whole) // 2], strict=False)
    assert np.array_equal(image[:16], rd.image.decode_jpeg(whole)[:16])
    assert not np.array_equal(image, rd.image.decode_jpeg(whole))


@given(st.data())
def test_a_flipped_bit_is_an_error_or_an_image_of_the_same_size(data: st.DataObject) -> None:
    broken = bytearray(encode(picture(), quality=85))
    position = data.draw(st.integers(0, len(broken) - 1))
    broken[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        image = rd.image.decode_jpeg(bytes(broken), max_pixels=10**6)
    except (rd.DataLossError, rd.InvalidArgumentError):
        return
    assert image.shape == rd.image.image_shape(bytes(broken))


def test_a_bomb_is_refused_by_its_header() -> None:
    data = encode(picture())
    start = data.index(b"\xff\xc0") + 5
    bomb = data[:start] + b"\xea\x60" * 2 + data[start + 4 :]
    with pytest.raises(
        rd.InvalidArgumentError, match=r"max_pixels=67,108,864 pixels, but .* 60000 x 60000 = 3,600,000,000"
    ):
        rd.image.decode_jpeg(bomb)


@pytest.mark.parametrize("channels", [2, 4, "RGB"])
def test_other_channels_are_refused(channels: object) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"channels of a JPEG must be one of 0, 1, 3 .*, got "):
        rd.image.decode_jpeg(encode(picture()), channels)  # type: ignore[arg-type]  # the point of this test


def test_a_path_is_no_data() -> None:
    with pytest.raises(rd.SpecError, match=r"must be bytes, got 'a.jpg' \(str\). rd.image.read_file"):
        rd.image.decode_jpeg("a.jpg")
