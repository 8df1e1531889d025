"""Models of timm, torchvision, diffusers and lightning train on replicas as on one device."""

from __future__ import annotations

import pytest

import raydist as rd
from tests.hub.harness import check_equal
from tests.hub.vision import VISION

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", VISION)
def test_models_reach_the_parameters_of_one_device(name: str, two: rd.MirroredStrategy) -> None:
    check_equal(two, VISION[name])
