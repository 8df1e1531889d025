"""Decoding of JPEG and PNG, checks of headers, missing codecs."""

from __future__ import annotations

import itertools
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.image.decode import codec
from tests.image.samples import by_pillow, encode, picture


def test_the_format_is_found_by_the_first_bytes() -> None:
    for kind, decode in (("JPEG", rd.image.decode_jpeg), ("PNG", rd.image.decode_png)):
        data = encode(picture(), kind)
        assert np.array_equal(rd.image.decode_image(data), decode(data))
        assert rd.image.decode_image(data, channels=1).shape == (37, 53, 1)
        assert rd.image.image_shape(data) == (37, 53, 3)
        with pytest.raises(rd.InvalidArgumentError, match="max_pixels=9 pixels"):
            rd.image.decode_image(data, max_pixels=9)
        assert np.array_equal(rd.image.decode_image(data, max_pixels=37 * 53), decode(data))
    for data in (b"", b"GIF89a...", b"\xff\xd8"):
        with pytest.raises(rd.InvalidArgumentError, match=f"a JPEG or a PNG, got {len(data)} bytes that begin with"):
            rd.image.decode_image(data)
    with pytest.raises(rd.SpecError, match=r"must be bytes, got 'a.jpg' \(str\). rd.image.read_file"):
        rd.image.decode_jpeg("a.jpg")


def test_decode_and_random_crop_is_decode_then_random_crop() -> None:
    for kind in ("JPEG", "PNG"):
        data = encode(picture(), kind)
        for seed in range(20):
            expected = rd.image.random_crop(rd.image.decode_image(data, 3), (20, 30), rng=np.random.default_rng(seed))
            cropped = rd.image.decode_and_random_crop(data, (20, 30), 3, rng=np.random.default_rng(seed))
            assert np.array_equal(cropped, expected)
        assert rd.image.decode_and_random_crop(data, 9, rng=np.random.default_rng(0)).shape == (9, 9, 3)
        with pytest.raises(rd.InvalidArgumentError, match="image of 37 x 53 pixels, got 38 x 38 pixels"):
            rd.image.decode_and_random_crop(data, 38, rng=np.random.default_rng(0))


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


def test_pixels_are_those_of_libjpeg() -> None:
    for subsampling, progressive in itertools.product((0, 1, 2), (False, True)):
        data = encode(picture(), quality=85, subsampling=subsampling, progressive=progressive)
        assert np.array_equal(rd.image.decode_jpeg(data), by_pillow(data, "RGB")), (subsampling, progressive)
    grey, colour = encode(picture(channels=1)), encode(picture())
    assert rd.image.decode_jpeg(grey).shape == rd.image.decode_jpeg(colour, channels=1).shape == (37, 53, 1)
    assert np.array_equal(rd.image.decode_jpeg(grey), by_pillow(grey, "L"))
    assert np.array_equal(rd.image.decode_jpeg(grey, channels=3), np.repeat(by_pillow(grey, "L"), 3, axis=2))
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


def test_a_window_outside_is_an_error_with_sizes() -> None:
    data = encode(picture())[:-9]  # the window is found before the damage is
    for window in ((0, 0, 38, 1), (30, 0, 8, 1), (0, 50, 1, 4), (-1, 0, 2, 2), (0, 0, 0, 3)):
        outside = rf"inside of the image of 37 x 53 .* got {window[2]} x {window[3]}"
        with pytest.raises(rd.InvalidArgumentError, match=outside):
            rd.image.decode_and_crop_jpeg(data, window)


def test_damaged_data_is_an_error_and_what_is_left_of_it_can_be_had() -> None:
    whole = encode(picture(200, 200), quality=85)
    half = whole[: len(whole) // 2]
    for data in (b"", whole[:20], whole[:400], half, whole[:-2], b"\xff\xd8\xff", b"\0" * 100):
        with pytest.raises(rd.DataLossError, match=f"must be a whole JPEG image, got {len(data)} bytes"):
            rd.image.decode_jpeg(data)
    image = rd.image.decode_jpeg(half, strict=False)
    assert np.array_equal(image[:16], rd.image.decode_jpeg(whole)[:16])
    assert not np.array_equal(image, rd.image.decode_jpeg(whole))


def test_a_bomb_is_refused_by_its_header() -> None:
    data = encode(picture())
    start = data.index(b"\xff\xc0") + 5
    bomb = data[:start] + b"\xea\x60" * 2 + data[start + 4 :]
    message = r"max_pixels=67,108,864 pixels, but .* 60000 x 60000 = 3,600,000,000"
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.image.decode_jpeg(bomb)
    with pytest.raises(rd.InvalidArgumentError, match=r"50000 x 100000 = 5,000,000,000. Pass a larger max_pixels"):
        rd.image.decode_png(png(100_000, 50_000, b""))


def test_other_channels_are_refused() -> None:
    wrong: list[Any] = [2, 4, "RGB"]
    for channels in wrong:
        with pytest.raises(rd.InvalidArgumentError, match=r"channels of a JPEG must be one of 0, 1, 3 .*, got "):
            rd.image.decode_jpeg(encode(picture()), channels)
    with pytest.raises(rd.InvalidArgumentError, match="channels of a PNG must be one of 0, 1, 2, 3, 4"):
        rd.image.decode_png(encode(picture(), "PNG"), channels=5)


def test_pixels_come_back_and_channels_are_converted() -> None:
    for stored in (1, 2, 3, 4):
        data = encode(picture(channels=stored), "PNG")
        assert np.array_equal(rd.image.decode_png(data), picture(channels=stored))
        assert rd.image.image_shape(data) == (37, 53, stored)
        for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
            assert np.array_equal(rd.image.decode_png(data, channels), by_pillow(data, mode)), (stored, mode)


def test_palettes_transparent_colours_and_single_bits() -> None:
    plain = encode(picture(), "PNG", mode="P")
    clear = encode(picture(), "PNG", mode="P", transparency=0)
    assert np.array_equal(rd.image.decode_png(plain), by_pillow(plain, "RGB"))
    assert np.array_equal(rd.image.decode_png(clear), by_pillow(clear, "RGBA"))
    assert rd.image.image_shape(clear) == (37, 53, 4)
    grey = np.array([[[7], [8]]], np.uint8)
    assert rd.image.decode_png(encode(grey, "PNG", transparency=7)).tolist() == [[[7, 0], [8, 255]]]
    assert set(np.unique(rd.image.decode_png(encode(picture(channels=1), "PNG", mode="1")))) == {0, 255}


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


def test_damage_of_a_png_is_named() -> None:
    whole = encode(picture(), "PNG")
    with pytest.raises(rd.DataLossError, match=r"at byte 33: the checksum of chunk b'IDAT' is wrong") as caught:
        rd.image.decode_png(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    assert caught.value.offset == 33
    cases = [
        (png(40, 40, b"\0" * 50), "truncated"),  # too few pixels with right checksums
        (png(0, 2, b""), "its header says 2 x 0 pixels of colour type 2"),
        (png(3, 2, b"", colour_type=7), "its header says 2 x 3 pixels of colour type 7"),
        (whole[:33] + b"\x7f\xff\xff\xff" + whole[37:], "a chunk is not complete"),  # gigabytes are not allocated
    ]
    for data, message in cases:
        with pytest.raises(rd.DataLossError, match=message):
            rd.image.decode_png(data)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, pixels: bytes, *, colour_type: int = 2, bits: int = 8) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def test_threads_that_need_it_at_once_get_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_codec.py").write_text("import time\ntime.sleep(0.2)\ndecode = len\n")
    monkeypatch.syspath_prepend(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        decoders = list(threads.map(lambda _: codec("slow_codec").decode, range(4)))
    assert decoders == [len] * 4


def test_a_missing_one_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    jpeg, png = encode(picture()), encode(picture(), "PNG")
    for module in ("simplejpeg", "PIL.PngImagePlugin", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    for data in (jpeg, png):
        with pytest.raises(rd.FailedPreconditionError, match=r"Run: pip install 'raydist\[images\]'"):
            rd.image.decode_image(data)
    with pytest.raises(rd.FailedPreconditionError, match="need the package PIL"):
        rd.image.resize(picture(), (2, 2))
    assert rd.image.flip_left_right(np.zeros((1, 2, 3))).shape == (1, 2, 3)  # what needs no codec works
