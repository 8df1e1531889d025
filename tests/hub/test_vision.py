"""Tiny models of timm, diffusers and lightning train on replicas as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import lightning
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from tests.hub.harness import Case, Tensors, check_equal
from tests.hub.models import CLASSES, labels, noise


def image_loss(model: Any, batch: Tensors) -> torch.Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def of_timm(name: str) -> Callable[[], Any]:
    return lambda: timm.create_model(name, num_classes=CLASSES).double()


def unet() -> Any:
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).double()


def denoising_loss(model: Any, batch: Tensors) -> torch.Tensor:
    return F.mse_loss(model(batch["noisy"], batch["timesteps"]).sample, batch["noise"])


class Classifier(lightning.LightningModule):
    """A module whose `training_step` knows the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch["images"]), batch["labels"])


def lightning_loss(model: Any, batch: Tensors) -> torch.Tensor:
    return model.training_step(batch, 0)


PIXELS = {"images": noise(3, 32, 32), "labels": labels()}

STEPS = torch.arange(11) * 80

VISION = {
    "timm ResNet": Case(of_timm("test_resnet"), PIXELS, image_loss, prepare=rd.SyncBatchNorm.convert),
    "timm ViT": Case(of_timm("test_vit"), {**PIXELS, "images": noise(3, 160, 160)}, image_loss),
    "diffusers UNet": Case(
        unet, {"noisy": noise(3, 8, 8), "noise": noise(3, 8, 8, seed=4), "timesteps": STEPS}, denoising_loss
    ),
    "LightningModule": Case(Classifier, {"images": noise(3, 4, 4), "labels": labels()}, lightning_loss),
}

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", VISION)
def test_models_reach_the_parameters_of_one_device(name: str, two: rd.MirroredStrategy) -> None:
    check_equal(two, VISION[name])
