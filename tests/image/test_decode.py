"""Decoding of JPEG and PNG, checks of headers, missing codecs."""

from __future__ import annotations

import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.image.decode import codec
from tests.image.samples import by_pillow, encode, picture


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


def test_a_bomb_is_refused_by_its_header_of_a_png() -> None:
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


def test_other_channels_of_a_png_are_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="channels of a PNG must be one of 0, 1, 2, 3, 4"):
        rd.image.decode_png(encode(picture(), "PNG"), channels=5)


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
    with pytest.raises(rd.FailedPreconditionError, match="needs PIL"):
        rd.image.resize(picture(), (2, 2))
    assert rd.image.flip_left_right(np.zeros((1, 2, 3))).shape == (1, 2, 3)  # what needs no codec works
