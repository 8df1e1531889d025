"""Data sets of scikit-learn, Hugging Face and torchvision."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

import raydist as rd
from tests.pipelines.sources.saved_hub_dataset import save_to_disk


@pytest.mark.parametrize("name", ["digits", "iris", "wine", "breast_cancer", "diabetes"])
def test_tables_of_scikit_learn(name: str) -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    expected = getattr(sklearn, f"load_{name}")()
    dataset, info = rd.load(name, "train", as_supervised=True, with_info=True)
    features, labels = map(np.stack, zip(*dataset.as_numpy_iterator(), strict=True))
    np.testing.assert_array_equal(features, expected["images" if name == "digits" else "data"])
    np.testing.assert_array_equal(labels, expected["target"])
    assert info.splits == {"train": len(labels)}
    if name != "diabetes":
        assert info.class_names["label"] == tuple(map(str, expected["target_names"]))
    half = rd.load(name, "train[50%:]", as_supervised=True)
    assert len(list(half.global_shuffle(seed=2))) == len(labels) - round(len(labels) / 2)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module, name, install in [
        ("sklearn.datasets", "iris", "scikit-learn"),
        ("datasets", "huggingface:imdb", r"'raydist\[hub\]'"),
        ("torchvision.datasets", "torchvision:CIFAR10", "torchvision"),
    ]:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(rd.FailedPreconditionError, match=f"pip install {install}"):
            rd.load(name, "train", data_dir=tmp_path)


def table(count: int) -> pa.Table:
    return pa.table({"text": [f"row {i}" for i in range(count)], "label": list(range(count))})


def test_directories_of_hugging_face(tmp_path: Path) -> None:
    single = save_to_disk(tmp_path / "single", table(20))
    dataset = rd.load(f"huggingface:{single}", "train[25%:50%]", as_supervised=True, keys=("text", "label"))
    assert [(text, int(label)) for text, label in dataset] == [(f"row {i}", i) for i in range(5, 10)]
    assert sorted(int(label) for _, label in dataset.global_shuffle(seed=1)) == [*range(5, 10)]
    several = tmp_path / "several"
    several.mkdir()
    save_to_disk(several / "train", table(30))
    save_to_disk(several / "test", table(6))
    (several / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    datasets, info = rd.load(f"huggingface:{several}", ["train[:3]", "test[-1:]+train[-1:]"], with_info=True)
    assert [[int(row["label"]) for row in each] for each in datasets] == [[0, 1, 2], [5, 29]]
    assert info.splits == {"train": 30, "test": 6}
    (several / "dataset_dict.json").write_text(json.dumps({"splits": ["../single"]}))
    with pytest.raises(rd.InvalidArgumentError, match="must lie in it"):
        rd.load(f"huggingface:{several}", "train")
    (several / "dataset_dict.json").write_text(json.dumps({"splits": 3}))
    with pytest.raises(rd.DataLossError, match="must list the splits"):
        rd.load(f"huggingface:{several}", "train")
    with pytest.raises(rd.InvalidArgumentError, match="needs a directory or a name"):
        rd.load("huggingface", "train")


class Pictures:
    """A dataset like those of torchvision, which makes its images."""

    opened: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, root: str, train: bool = True, download: bool = False, side: int = 2) -> None:
        self.opened.append({"root": root, "train": train, "download": download})
        if not (Path(root) / "here").exists() and not download:
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.count, self.side = (8 if train else 4), side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.full((self.side, self.side, 3), index, np.uint8), index % 2


class Streets(Pictures):
    def __init__(self, root: str, split: str = "train") -> None:
        super().__init__(root, train=split != "extra")


def test_classes_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torchvision.datasets")
    vars(module).update(Pictures=Pictures, Streets=Streets)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)
    Pictures.opened.clear()
    with pytest.raises(rd.NotFoundError, match="torchvision says: Dataset not found"):
        rd.load("torchvision:Pictures", "train", data_dir=tmp_path)
    (tmp_path / "here").touch()
    Pictures.opened.clear()
    dataset = rd.load("torchvision:Pictures", "train[2:]", as_supervised=True, data_dir=tmp_path, side=3)
    assert [(image[0, 0, 0].item(), image.shape, int(label)) for image, label in dataset] == [
        (i, (3, 3, 3), i % 2) for i in range(2, 8)
    ]
    assert Pictures.opened == [{"root": str(tmp_path), "train": True, "download": False}]
    assert sorted(image[0, 0, 0].item() for image, _ in dataset.global_shuffle(seed=1)) == [*range(2, 8)]
    rd.load("torchvision:Pictures", "test", data_dir=tmp_path, download=True)
    assert Pictures.opened[-1] == {"root": str(tmp_path), "train": False, "download": True}
    streets = rd.load("torchvision:Streets", data_dir=tmp_path, split_names=("train", "extra"))
    assert {split: len(each) for split, each in streets.items()} == {"train": 8, "extra": 4}
    with pytest.raises(
        rd.InvalidArgumentError, match="needs the name of a class of torchvision.datasets, got 'Nothing'"
    ):
        rd.load("torchvision:Nothing", "train", data_dir=tmp_path)
