from __future__ import annotations

import pytest

import raydist as rd
from raydist.image.encoded import corrupt, require_bytes, require_channels, require_pixels


@pytest.mark.parametrize("data", [b"ab", bytearray(b"ab"), memoryview(b"ab")])
def test_buffers_are_bytes(data: object) -> None:
    assert require_bytes(data) == b"ab"


@pytest.mark.parametrize("data", ["ab", 3, None])
def test_other_data_is_named(data: object) -> None:
    with pytest.raises(rd.SpecError, match=f"must be bytes, got {data!r}"):
        require_bytes(data)


def test_limits_are_inclusive() -> None:
    require_pixels(4, 5, 20)
    with pytest.raises(rd.InvalidArgumentError, match="max_pixels=19 pixels, but its header says 4 x 5 = 20"):
        require_pixels(4, 5, 19)


def test_channels_are_listed() -> None:
    require_channels(3, (0, 3), "JPEG")
    with pytest.raises(rd.InvalidArgumentError, match="channels of a JPEG must be one of 0, 3"):
        require_channels(1, (0, 3), "JPEG")


def test_an_error_has_the_first_bytes_and_the_place() -> None:
    error = corrupt("PNG", b"0123456789", "why", 7)
    assert str(error) == "The data must be a whole PNG image, got 10 bytes that begin with b'01234567' at byte 7: why."
    assert error.offset == 7
