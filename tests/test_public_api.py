from __future__ import annotations

import subprocess
import sys

import pytest

import raydist as rd


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_import_loads_neither_torch_nor_ray_nor_numpy() -> None:
    code = "import sys, raydist; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(run_python(code).split())
    assert "raydist" in loaded
    assert not loaded & {"torch", "ray", "numpy", "pyarrow", "torchmetrics", "rich"}


@pytest.mark.parametrize("name", rd.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(rd, name) is not None
    assert name in dir(rd)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Datset'"):
        _ = rd.Datset  # type: ignore[attr-defined]  # the point of the test
