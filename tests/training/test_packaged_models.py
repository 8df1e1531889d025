"""Stand-ins for models of transformers, peft and timm train on replicas as on one device.

`make test-hub` trains those of the packages themselves.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import raydist as rd
from tests.hub.harness import BATCH, ROWS, Case, assert_same, batches_of, check_equal, seeded, sgd, train_plainly
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


def drawn(shape: tuple[int, ...], most: int, seed: int) -> torch.Tensor:
    return torch.randint(0, most, (ROWS, *shape), generator=torch.Generator().manual_seed(seed))


def text() -> dict[str, torch.Tensor]:
    mask = (torch.arange(LENGTH) < 2 + torch.arange(ROWS)[:, None] % 5).long()
    return {"input_ids": drawn((LENGTH,), packaged_models.WORDS, 1), "attention_mask": mask}


def spoken() -> dict[str, torch.Tensor]:
    """Few labels in some rows, many in others."""
    rows = text()
    return {**rows, "labels": torch.where(rows["attention_mask"] == 1, rows["input_ids"], -100)}


def classified(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**rows, "labels": drawn((), packaged_models.CLASSES, 2)}


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def image_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def token_loss(model: Any, batch: Any) -> torch.Tensor:
    """A mean over all tokens, and so over rows."""
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"])


def adapted(package: Any) -> Any:
    return package.get_peft_model(package.CausalModel())


MODELS: list[tuple[Callable[[Any], Any], dict[str, torch.Tensor]]] = [
    (lambda package: package.SequenceClassifier(), classified(text())),
    (lambda package: package.CausalModel(), spoken()),
    (adapted, spoken()),
]


@pytest.mark.parametrize(("make", "rows"), MODELS, ids=["BERT", "GPT-2", "LoRA"])
def test_fit_evaluate_and_predict_are_those_of_one_device(
    make: Any, rows: dict[str, torch.Tensor], package: Any, two: rd.MirroredStrategy
) -> None:
    plain = train_plainly(seeded(lambda: make(package).double()), batches_of(rows, 2), own_loss)
    with two.scope():
        model = rd.Model(seeded(lambda: make(package).double()))
        model.compile(sgd(model.module), loss="model")
    data = rd.Dataset.from_tensor_slices(rows).batch(BATCH)
    model.fit(data, epochs=2, verbose=False)
    assert_same(model.module.state_dict(), plain.state_dict())
    whole = plain.eval()(**rows)
    assert model.evaluate(data, verbose=False)["loss"] == pytest.approx(whole.loss.item(), rel=1e-9)
    assert_same(model.predict(data, verbose=False), {"logits": whole.logits.detach()})


def test_adapters_alone_are_trained(package: Any, two: rd.MirroredStrategy) -> None:
    start = seeded(lambda: adapted(package).double()).state_dict()
    model = check_equal(two, Case(lambda: adapted(package).double(), spoken(), token_loss))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert model.lm_head.weight is model.embed.weight  # found in the model that is wrapped


def test_a_batch_norm_with_an_activation(package: Any, two: rd.MirroredStrategy) -> None:
    images = torch.randn(ROWS, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    case = Case(lambda: package.ConvNet().double(), classified({"images": images}), image_loss)
    model = check_equal(two, replace(case, prepare=rd.SyncBatchNorm.convert))
    assert model.bn.__class__ is package.BatchNormAct2d
