from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import raydist as rd
from raydist.image.libraries import codec
from tests.image.samples import encode, picture


def test_a_codec_is_imported() -> None:
    assert codec("PIL.Image").__name__ == "PIL.Image"


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
