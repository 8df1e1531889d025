from __future__ import annotations

from pathlib import Path

import pytest

from raydist.core.errors import InvalidArgumentError, NotFoundError, SpecError
from raydist.pipelines.formats.files import data_loss, file_errors, local_path, path_text


@pytest.mark.parametrize("path", [3, 2.5, None, ["a"]])
def test_a_name_is_text_bytes_or_a_path(path: object) -> None:
    with pytest.raises(SpecError, match="A file name must be a str"):
        path_text(path)


def test_names() -> None:
    assert path_text(Path("a") / "b") == path_text(b"a/b") == "a/b"
    assert [local_path(p) for p in ("a/b", "file:///a", "s3://a/b")] == ["a/b", "/a", None]


def test_data_loss_names_file_and_offset() -> None:
    error = data_loss("f.bin", 12, "Something must hold")
    assert (str(error), error.path, error.offset) == ("Something must hold (file 'f.bin', byte 12).", "f.bin", 12)


def test_what_a_system_says_becomes_an_error_of_ours_or_gets_the_place() -> None:
    with pytest.raises(NotFoundError, match=r"must exist, got 'x.bin'"), file_errors("x.bin"):
        raise FileNotFoundError
    with pytest.raises(InvalidArgumentError, match="'x.bin' is a directory"), file_errors("x.bin"):
        raise IsADirectoryError
    with pytest.raises(ValueError, match="odd") as caught, file_errors("x.bin", 7):
        raise ValueError("odd")
    assert caught.value.__notes__ == ["while accessing 'x.bin' at byte 7"]
