"""Files of real data that other programs wrote. They are not part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE_THE_CHECKOUT = Path(__file__).parent.parent.parent / "shared" / "data"


def real_file(name: str) -> Path:
    """A data file from the folder that RAYDIST_TEST_DATA names, or from ../shared/data. Skips the test without it."""
    folder = Path(os.environ.get("RAYDIST_TEST_DATA", _BESIDE_THE_CHECKOUT))
    path = folder / name
    if not path.is_file():
        pytest.skip(f"needs the file {name}, which is not in {folder}: set RAYDIST_TEST_DATA")
    return path
