from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import raydist as rd
from tests.image.tensorflow_values import PIXELS, check_call, values_of


@pytest.mark.parametrize("row", values_of("rot90", "transpose"), ids=lambda row: str(row["call"]))
def test_as_in_tensorflow(row: dict[str, Any]) -> None:
    check_call(row)


@pytest.mark.parametrize("turn", [rd.image.rot90, rd.image.transpose])
def test_results_are_copies_and_a_batch_is_its_images(turn: Any) -> None:
    batch = np.stack([PIXELS, PIXELS[::-1]])
    assert np.array_equal(turn(batch), np.stack([turn(image) for image in batch]))
    result = turn(PIXELS)
    assert result.base is None
    assert result.flags.c_contiguous


def test_k_is_a_whole_number() -> None:
    assert np.array_equal(rd.image.rot90(PIXELS, 4), PIXELS)
    with pytest.raises(TypeError, match="float"):
        rd.image.rot90(PIXELS, 1.5)  # type: ignore[arg-type]  # the point of this test
