"""Stand-ins for models of transformers and peft train on replicas as on one device.

`make test-hub` trains those of the packages themselves.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from tests.hub.harness import BATCH, ROWS, assert_same, batches_of, seeded, sgd, train_plainly
from tests.training import packaged_models

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

LENGTH = 6
SOURCE = Path(packaged_models.__file__)
NAME = "standin_models"


def add_folder(folder: str) -> None:
    sys.path.insert(0, folder)


def forget_folder(folder: str) -> None:
    sys.path.remove(folder)
    sys.modules.pop(NAME, None)


@pytest.fixture
def package(tmp_path: Path, two: rd.MirroredStrategy) -> Iterator[Any]:
    """The stand-ins as a package that is installed here and for the replicas."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    shutil.copy(SOURCE, folder / f"{NAME}.py")
    add_folder(str(folder))
    two.local_results(two.run(add_folder, args=(str(folder),)))
    yield importlib.import_module(NAME)
    forget_folder(str(folder))
    two.local_results(two.run(forget_folder, args=(str(folder),)))


def spoken() -> dict[str, torch.Tensor]:
    """Few labels in some rows, many in others."""
    ids = torch.randint(0, packaged_models.WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) < 2 + torch.arange(ROWS)[:, None] % 5).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def test_fit_evaluate_and_predict_are_those_of_one_device(package: Any, two: rd.MirroredStrategy) -> None:
    def made() -> Any:
        return seeded(lambda: package.get_peft_model(package.CausalModel()).double())

    rows = spoken()
    plain = train_plainly(made(), batches_of(rows, 2), own_loss)
    with two.scope():
        model = rd.Model(made())
        model.compile(sgd(model.module), loss="model")
    data = rd.Dataset.from_tensor_slices(rows).batch(BATCH)
    model.fit(data, epochs=2, verbose=False)
    assert_same(model.module.state_dict(), plain.state_dict())
    whole = plain.eval()(**rows)
    assert model.evaluate(data, verbose=False)["loss"] == pytest.approx(whole.loss.item(), rel=1e-9)
    assert_same(model.predict(data, verbose=False), {"logits": whole.logits.detach()})
    start = made().state_dict()
    moved = {name for name, value in model.module.state_dict().items() if not torch.equal(value, start[name])}
    assert moved
    assert all("lora_" in name for name in moved), "adapters alone are trained"
    module: Any = model.module
    assert module.lm_head.weight is module.embed.weight  # found in the model that is wrapped
