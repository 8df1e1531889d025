"""Data sets of users: written once, whole or not at all, and read from there. Slices leave out the rest."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import raydist as rd
from raydist.pipelines.stored.containers import read_chunk
from tests.contracts.op import check_op

ROWS = 1000


class Points(rd.DatasetBuilder):
    """Points."""

    name = "test_points"
    supervised_keys = (("x", "name"), "label")
    class_names = {"label": ("even", "odd")}
    made: ClassVar[list[str]] = []

    def splits(self) -> Mapping[str, Callable[[], Any]]:
        return {"train": lambda: self.rows("train", ROWS), "test": lambda: self.rows("test", 10)}

    def rows(self, split: str, count: int) -> Iterator[dict[str, Any]]:
        for i in range(count):
            if i == 0:
                self.made.append(split)
            yield {
                **{"x": np.full((2, 3), i, np.float32), "name": f"{split} {i}", "label": i % 2},
                "more": {"raw": bytes([i % 256]), "ragged": np.arange(i % 4)},
            }


@pytest.fixture
def points(tmp_path: Path) -> Points:
    Points.made.clear()
    return Points(tmp_path)


def numbers(dataset: rd.Dataset) -> list[str]:
    return [row["name"] for row in dataset.as_numpy_iterator()]


def test_examples_are_written_once_and_read_as_they_were(points: Points, tmp_path: Path) -> None:
    made = list(points.rows("train", ROWS))
    Points.made.clear()
    for _ in range(2):
        train = rd.load("test_points", "train", data_dir=tmp_path)
        for expected, got in zip(made, train.as_numpy_iterator(), strict=True):
            assert list(got) == ["x", "name", "label", "more"]
            np.testing.assert_array_equal(got["x"], expected["x"])
            np.testing.assert_array_equal(got["more"]["ragged"], expected["more"]["ragged"])
            assert (got["x"].dtype, got["more"]["raw"]) == (np.float32, expected["more"]["raw"])
            assert (got["name"], got["label"]) == (expected["name"], expected["label"])
    assert sorted(set(Points.made)) == ["test", "train"]
    read_for_specs = Points.made.count("train")
    assert read_for_specs == 2  # for the spec, and to write
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
    assert list(tmp_path.rglob(".*")) == []


def test_slices_of_what_is_written_are_python_slices(points: Points) -> None:
    names = [f"train {i}" for i in range(ROWS)]
    for spec, expected in [
        ("train[:80%]", names[:800]),
        ("train[10:20]", names[10:20]),
        ("train[-7:]", names[-7:]),
        ("train[999:]+test[:2]+train[:1]", [names[999], "test 0", "test 1", names[0]]),
        ("train[5:5]", []),
        ("train[1000:]", []),
        ("train[20:10]", []),
    ]:
        dataset = points.as_dataset(spec)
        assert numbers(dataset) == expected, spec
        assert len(dataset) == len(expected) == points.info.num_examples(spec)
    both = points.as_dataset({"a": "train[:3]", "b": ["test[:1]", ("test[1:2]",)]})
    assert (numbers(both["a"]), numbers(both["b"][0]), numbers(both["b"][1][0])) == (names[:3], ["test 0"], ["test 1"])
    assert {split: len(dataset) for split, dataset in points.as_dataset().items()} == {"train": ROWS, "test": 10}
    assert numbers(points.as_dataset("all")) == [*names, *(f"test {i}" for i in range(10))]


def test_a_slice_does_not_read_the_chunks_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(rd.DatasetBuilder):
        name = "test_wide"

        def splits(self) -> Mapping[str, Callable[[], Any]]:
            rows = np.random.default_rng(0).integers(0, 1 << 62, (48, 1 << 16))  # 24 MB: several chunks
            return {"train": lambda: rd.Dataset.from_tensor_slices({"row": np.arange(48), "x": rows})}

    whole = Wide(tmp_path).as_dataset("train")
    (manifest,) = (path for path in tmp_path.rglob("manifest.json"))
    chunks = [
        chunk for part in json.loads(manifest.read_text())["saved"]["parts"] for chunk in part["chunks"] if chunk[3]
    ]
    assert len(chunks) >= 4
    read: list[int] = []

    def noted(file: Any, path: str, chunk: Any) -> bytes:
        read.extend([chunk.rows] if chunk.rows else [])
        return read_chunk(file, path, chunk)

    monkeypatch.setattr("raydist.pipelines.stored.containers.read_chunk", noted)
    last = Wide(tmp_path).as_dataset("train[-3:]")
    assert [int(row["row"]) for row in last.as_numpy_iterator()] == [45, 46, 47]
    assert len(read) == 1
    iterator = iter(last)
    next(iterator)
    state = iterator.state_dict()
    resumed = iter(Wide(tmp_path).as_dataset("train[-3:]"))
    resumed.load_state_dict(state)
    assert [int(row["row"]) for row in resumed] == [46, 47]
    assert len(whole) == 48


def test_supervised_pairs(points: Points) -> None:
    (features, label), *_ = points.as_dataset("test[3:]", as_supervised=True).as_numpy_iterator()
    assert list(features) == ["x", "name"]
    assert (features["name"], label) == ("test 3", 1)
    assert pickle.loads(pickle.dumps(points.as_dataset("test", as_supervised=True))).element_spec[1].dtype == np.int64


def test_the_description_is_whole_and_frozen(points: Points, tmp_path: Path) -> None:
    test, info = rd.load("test_points", "test[:3]", with_info=True, data_dir=tmp_path)
    assert (len(test), info.name, info.splits, info.description) == (
        3,
        "test_points",
        {"train": 1000, "test": 10},
        "Points.",
    )
    assert info.class_names == {"label": ("even", "odd")}
    assert info.features["x"] == rd.TensorSpec((2, 3), np.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "other"
    assert "test_points" in rd.list_builders()
    assert pickle.loads(pickle.dumps(info)) == info


def test_another_version_is_written_anew(points: Points, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points.prepare()
    monkeypatch.setattr(Points, "version", "2.0.0")
    assert len(Points(tmp_path).as_dataset("test")) == 10
    assert sorted(path.name for path in (tmp_path / "prepared" / "test_points").iterdir()) == ["1.0.0", "2.0.0"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    class Failing(rd.DatasetBuilder):
        name = "test_failing"

        def splits(self) -> Mapping[str, Callable[[], Any]]:
            return {"train": lambda: [{"x": 1}], "test": self.broken}

        def broken(self) -> Iterator[dict[str, int]]:
            yield {"x": 1}
            raise ArithmeticError("the third row")

    with pytest.raises(ArithmeticError, match="the third row"):
        rd.load("test_failing", "train", data_dir=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.endswith(".tmp")] == []


PREPARES = """
import os, sys, time
import numpy as np
import raydist as rd

class Slow(rd.DatasetBuilder):
    name = "test_slow"

    def splits(self):
        return {"train": self.rows, "test": lambda: [{"x": 1, "of": os.getpid()}]}

    def rows(self):
        for i in range(300):
            if i == 150:
                print("half", flush=True)
                sys.stdin.readline()
            yield {"x": i, "of": os.getpid()}

rows = list(rd.load("test_slow", "train", data_dir=sys.argv[1]).as_numpy_iterator())
assert [row["x"] for row in rows] == list(range(300))
print(*{int(row["of"]) for row in rows}, flush=True)
"""


def start(script: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.mark.timeout(120)
def test_two_processes_that_write_at_the_same_time_and_one_that_dies(tmp_path: Path) -> None:
    script = tmp_path / "prepare.py"
    script.write_text(PREPARES)
    folder = tmp_path / "data"
    dying, *others = (start(script, folder) for _ in range(3))
    for process in (dying, *others):
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
    dying.kill()
    dying.communicate()
    assert [path.name for path in folder.rglob("dataset_info.json")] == []
    found = [process.communicate("\n", timeout=60)[0].split() for process in others]
    assert [process.returncode for process in others] == [0, 0]
    assert found[0] == found[1], "both must read what one of them has written"
    assert found[0] in [[str(process.pid)] for process in others]
    left = list(folder.rglob(".*.tmp"))
    assert len(left) == 1, "that of the process that was killed"
    (prepared,) = (path.parent for path in folder.rglob("dataset_info.json"))
    prepared.rename(tmp_path / "elsewhere")
    third = start(script, folder)
    third.communicate("\n", timeout=60)
    assert (third.returncode, list(folder.rglob(".*.tmp"))) == (0, [])


def test_damage_is_named(points: Points, tmp_path: Path) -> None:
    points.prepare()
    (info,) = tmp_path.rglob("dataset_info.json")
    content = info.read_text()
    info.write_text(content[:-3])
    with pytest.raises(rd.DataLossError, match="must be intact") as caught:
        Points(tmp_path).as_dataset("train")
    assert caught.value.path == str(info)
    info.write_text(content.replace("test", "../x"))
    with pytest.raises(rd.DataLossError, match="its splits are"):
        Points(tmp_path).as_dataset("train")
    info.unlink()
    with pytest.raises(rd.DataLossError, match="must be intact, but NotFoundError"):
        Points(tmp_path).as_dataset("train")
    info.write_text(content)
    part = next(path for path in tmp_path.rglob("*.parquet") if "test" in str(path.parent.name))
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    with pytest.raises(rd.DataLossError) as caught:
        list(Points(tmp_path).as_dataset("test"))
    assert caught.value.path == str(part)


def test_datasets_that_are_read_where_they_are(tmp_path: Path) -> None:
    rd.Dataset.range(100).map(lambda x: {"x": x}).save(tmp_path / "saved")

    class Ready(rd.DatasetBuilder):
        name = "test_ready"
        is_prepared = False

        def splits(self) -> Mapping[str, Callable[[], Any]]:
            counted = rd.Dataset.from_generator(lambda: iter(range(20)), rd.TensorSpec((), np.int64))
            return {
                "range": lambda: rd.Dataset.range(10),
                "saved": lambda: rd.Dataset.load(tmp_path / "saved"),
                "counted": lambda: counted.assert_cardinality(20),
                "unknown": lambda: counted,
                "wrong": lambda: [1, 2],
            }

    ready = Ready(tmp_path / "none")
    assert [int(x) for x in ready.as_dataset("range[4:]").global_shuffle(seed=1)] != [4, 5, 6, 7, 8, 9]
    assert [int(row["x"]) for row in ready.as_dataset("saved[97:]")] == [97, 98, 99]
    assert [int(x) for x in ready.as_dataset("counted[5:8]+range[:1]")] == [5, 6, 7, 0]
    with pytest.raises(rd.InvalidArgumentError, match="must have a known number of elements"):
        ready.as_dataset("unknown")
    with pytest.raises(rd.InvalidArgumentError, match="must be datasets, because nothing is written"):
        ready.as_dataset("wrong")
    with pytest.raises(rd.InvalidArgumentError, match="has no supervised_keys"):
        ready.as_dataset("range", as_supervised=True)
    assert not (tmp_path / "none").exists()


def test_parquet_files_are_read_from_the_pieces_of_a_slice(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wide = np.random.default_rng(0).integers(0, 1 << 62, (40, 1 << 16))
    paths = [str(tmp_path / f"{number}.parquet") for number in range(4)]
    for number, path in enumerate(paths):
        rows = [*range(number * 10, number * 10 + 10)]
        pq.write_table(pa.table({"row": rows, "x": wide[rows].tolist()}), path, row_group_size=2)
    dataset = rd.Dataset.from_parquet(paths)

    class Files(rd.DatasetBuilder):
        name = "test_parquet"
        is_prepared = False

        def splits(self) -> Mapping[str, Callable[[], Any]]:
            return {"train": lambda: dataset}

    for first, end in [(0, 40), (0, 0), (39, 40), (13, 27), (20, 30), (3, 4), (40, 40)]:
        found = Files(tmp_path).as_dataset(f"train[{first}:{end}]")
        assert [int(row["row"]) for row in found.as_numpy_iterator()] == [*range(first, end)]
    for path in paths[:2] + paths[3:]:
        os.unlink(path)
    found = Files(tmp_path).as_dataset("train[20:30]")
    assert [int(row["row"]) for row in found.as_numpy_iterator()] == [*range(20, 30)]


def test_names_and_options_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(rd.DatasetBuilder):
        name = "test_nothing"

        def splits(self) -> Mapping[str, Callable[[], Any]]:
            return {}

    with pytest.raises(rd.InvalidArgumentError, match="one split at least"):
        Nothing(tmp_path).as_dataset("all")
    with pytest.raises(rd.InvalidArgumentError, match="files= must be a dict"):
        rd.load("mnist", "train", files=["train-images", "train-labels"])
    with pytest.raises(rd.InvalidArgumentError, match="s3://bucket/data"):
        rd.load("mnist", "train", data_dir="s3://bucket/data")
    with pytest.raises(rd.InvalidArgumentError, match="must be one of .*'?mnist.*, got 'nmist'"):
        rd.load("nmist")
    with pytest.raises(rd.InvalidArgumentError, match="The options of 'iris' must be those of .*data_dir"):
        rd.load("iris", "train", data_directory="x")
    monkeypatch.setenv("RAYDIST_DATA_DIR", str(tmp_path))
    assert rd.builder("mnist").data_dir == str(tmp_path)
    monkeypatch.delenv("RAYDIST_DATA_DIR")
    assert rd.builder("mnist").data_dir == os.path.expanduser("~/.cache/raydist/datasets")


def test_slices_of_what_is_written_are_datasets_as_others_are(points: Points) -> None:
    check_op(lambda: points.as_dataset("train[10:25]+test[-3:]", as_supervised=True))
    check_op(lambda: points.as_dataset("train[99%:]").shuffle(4, seed=1).batch(3, drop_remainder=True).unbatch())
