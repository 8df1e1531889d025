"""Data sets by name, by the packages themselves: directories of `datasets`, and classes of torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torchvision

import raydist as rd
from benchmarks import huggingface


def test_directories_and_names_of_hugging_face(tmp_path: Path) -> None:
    rows = {"text": [f"row {row}" for row in range(40)], "label": [row % 3 for row in range(40)]}
    train = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict({"train": train, "test": train.select(range(8))}).save_to_disk(tmp_path / "both")
    pairs = rd.load(f"huggingface:{tmp_path / 'both'}", "train[-25%:]+test", as_supervised=True, keys=("text", "label"))
    numbers = [*range(30, 40), *range(8)]
    assert [(text, int(label)) for text, label in pairs] == [(f"row {row}", row % 3) for row in numbers]


def write_to_cache(cache: Path, config: str, count: int) -> None:
    """What `load_dataset("some/numbers", config)` leaves behind."""
    folder = cache / "some___numbers" / config / "0.0.0" / "1234abcd"
    folder.mkdir(parents=True)
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "numbers-train.arrow")) as writer:
        for row in range(count):
            writer.write({"x": row})
        writer.finalize()
    features = datasets.Features({"x": datasets.Value("int64")})
    splits = {"train": {"name": "train", "num_examples": count, "dataset_name": "numbers"}}
    info = datasets.DatasetInfo(features=features, splits=splits, config_name=config, dataset_name="numbers")
    info.write_to_directory(str(folder))


def test_names_are_looked_for_in_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **kwargs: Any) -> Any:
        pytest.fail(f"the network must not be used, but {args}")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(rd.NotFoundError, match="download=True to fetch it from .*/datasets/no/where"):
        rd.load("huggingface:no/where", "train")
    write_to_cache(tmp_path, "small", 8)
    assert [int(row["x"]) for row in rd.load("huggingface:some/numbers", "train[-3:]")] == [5, 6, 7]
    write_to_cache(tmp_path, "large", 80)
    with pytest.raises(rd.NotFoundError, match="multiple 'some/numbers' configurations"):
        rd.load("huggingface:some/numbers", "train")
    assert len(rd.load("huggingface:some/numbers", "train", subset="large")) == 80


def test_rows_of_a_directory_are_those_of_the_torch_format(tmp_path: Path) -> None:
    for path in huggingface.write(tmp_path, 100).values():
        for ours, theirs in zip(huggingface.of_raydist(path, 8), huggingface.of_torch_format(path, 8), strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert np.array_equal(np.asarray(value), np.asarray(theirs[key])), key
    huggingface.main(["--smoke"])


def test_classes_of_torchvision(tmp_path: Path) -> None:
    made = torchvision.datasets.FakeData(size=20, image_size=(3, 6, 8), num_classes=4)
    options: dict[str, Any] = {"size": 20, "image_size": (3, 6, 8), "num_classes": 4, "data_dir": tmp_path}
    found = rd.load("torchvision:FakeData", "train[5:]", as_supervised=True, **options)
    for number, (image, label) in enumerate(list(found.as_numpy_iterator()), start=5):
        np.testing.assert_array_equal(image, np.asarray(made[number][0]))
        assert label == int(made[number][1])
    with pytest.raises(rd.NotFoundError, match="torchvision says: Dataset not found"):
        rd.load("torchvision:CIFAR10", "train", data_dir=tmp_path)
