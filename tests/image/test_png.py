from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from tests.image.samples import by_pillow, encode, picture


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pixels_come_back(channels: int) -> None:
    data = encode(picture(channels=channels), "PNG")
    assert np.array_equal(rd.image.decode_png(data), picture(channels=channels))
    assert rd.image.image_shape(data) == (37, 53, channels)


@pytest.mark.parametrize("stored", [1, 2, 3, 4])
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_channels_are_converted(stored: int, channels: int, mode: str) -> None:
    data = encode(picture(channels=stored), "PNG")
    assert np.array_equal(rd.image.decode_png(data, channels), by_pillow(data, mode))


def test_a_palette_is_rgb_and_with_a_transparent_colour_rgba() -> None:
    plain = encode(picture(), "PNG", mode="P")
    clear = encode(picture(), "PNG", mode="P", transparency=0)
    assert np.array_equal(rd.image.decode_png(plain), by_pillow(plain, "RGB"))
    assert np.array_equal(rd.image.decode_png(clear), by_pillow(clear, "RGBA"))
    assert rd.image.image_shape(clear) == (37, 53, 4)


def test_a_transparent_grey_is_alpha() -> None:
    grey = np.array([[[7], [8]]], np.uint8)
    assert rd.image.decode_png(encode(grey, "PNG", transparency=7)).tolist() == [[[7, 0], [8, 255]]]


def test_one_bit_is_black_and_white() -> None:
    data = encode(picture(channels=1), "PNG", mode="1")
    assert set(np.unique(rd.image.decode_png(data))) == {0, 255}


def test_of_sixteen_bits_the_upper_ones_are_kept() -> None:
    values = np.array([[0, 255, 256], [1000, 40000, 65535]], np.uint16)
    file = BytesIO()
    PIL.Image.fromarray(values).save(file, "PNG")
    assert rd.image.decode_png(file.getvalue())[..., 0].tolist() == (values >> 8).tolist()
    assert rd.image.decode_png(file.getvalue(), channels=3).shape == (2, 3, 3)
    colours = png(1, 1, b"\0" + struct.pack(">HHH", 255, 1000, 65535), bits=16)
    assert rd.image.decode_png(colours).tolist() == [[[0, 3, 255]]]


@given(st.data())
def test_damage_is_found_before_pixels_are(data: st.DataObject) -> None:
    whole = encode(picture(), "PNG")
    kind = data.draw(st.sampled_from(["flip", "cut", "zero"]))
    position = data.draw(st.integers(0, len(whole) - 1))
    broken = bytearray(whole)
    if kind == "flip":
        broken[position] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del broken[position:]
    else:
        broken[position : position + 20] = bytes(len(broken[position : position + 20]))
    if bytes(broken) == whole:
        return
    with pytest.raises(rd.DataLossError, match=f"whole PNG image, got {len(broken)} bytes"):
        rd.image.decode_png(bytes(broken), max_pixels=2**64)


def test_the_error_has_the_place_of_the_damage() -> None:
    broken = bytearray(encode(picture(), "PNG"))
    broken[60] ^= 1
    with pytest.raises(rd.DataLossError, match=r"at byte 33: the checksum of chunk b'IDAT' is wrong") as caught:
        rd.image.decode_png(bytes(broken))
    assert caught.value.offset == 33


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, pixels: bytes, *, colour_type: int = 2, bits: int = 8) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"50000 x 100000 = 5,000,000,000. Pass a larger max_pixels"):
        rd.image.decode_png(png(100_000, 50_000, b""))
    with pytest.raises(rd.InvalidArgumentError, match="max_pixels=5 pixels"):
        rd.image.decode_png(encode(picture(), "PNG"), max_pixels=5)


def test_too_few_pixels_with_right_checksums() -> None:
    with pytest.raises(rd.DataLossError, match="truncated"):
        rd.image.decode_png(png(40, 40, b"\0" * 50))


@pytest.mark.parametrize(("width", "colour_type"), [(0, 2), (3, 7)])
def test_a_header_that_cannot_be_is_named(width: int, colour_type: int) -> None:
    with pytest.raises(rd.DataLossError, match=f"its header says 2 x {width} pixels of colour type {colour_type}"):
        rd.image.decode_png(png(width, 2, b"", colour_type=colour_type))


def test_a_length_of_gigabytes_allocates_nothing() -> None:
    whole = encode(picture(), "PNG")
    with pytest.raises(rd.DataLossError, match="a chunk is not complete"):
        rd.image.decode_png(whole[:33] + b"\x7f\xff\xff\xff" + whole[37:])


def test_other_channels_are_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="channels of a PNG must be one of 0, 1, 2, 3, 4"):
        rd.image.decode_png(encode(picture(), "PNG"), channels=5)
