"""MNIST's family, CIFAR and folders of images, from files as they are published."""

from __future__ import annotations

import gzip
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydist as rd
from tests.contracts.op import check_op
from tests.datasets.image_files import idx_bytes, write_cifar, write_idx


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "folder", "prefixes"),
    [
        ("mnist", ".", ("train", "t10k")),
        ("mnist", "MNIST/raw", ("train", "t10k")),
        ("fashion_mnist", "fashion_mnist", ("train", "t10k")),
        ("kmnist", "KMNIST/raw", ("train", "t10k")),
        ("emnist/letters", "gzip", ("emnist-letters-train", "emnist-letters-test")),
    ],
)
def test_the_mnist_family(tmp_path: Path, name: str, folder: str, prefixes: tuple[str, str], suffix: str) -> None:
    images, labels = write_idx(tmp_path / folder, prefixes[0], 50, suffix)
    test_images, _ = write_idx(tmp_path / folder, prefixes[1], 20, suffix)
    (train, test), info = rd.load(name, ["train[:80%]", "test"], as_supervised=True, with_info=True, data_dir=tmp_path)
    assert (len(train), info.splits) == (40, {"train": 50, "test": 20})
    assert info.features == {"image": rd.TensorSpec((28, 28, 1), np.uint8), "label": rd.TensorSpec((), np.int64)}
    for number, (image, label) in enumerate(train.as_numpy_iterator()):
        np.testing.assert_array_equal(image, images[number, :, :, None])
        assert (label, label.dtype) == (labels[number], np.int64)
    np.testing.assert_array_equal(np.stack([image for image, _ in test.as_numpy_iterator()])[..., 0], test_images)


def test_rows_are_read_by_index(tmp_path: Path) -> None:
    images, labels = write_idx(tmp_path, "train", 500)
    dataset = rd.load("mnist", "train[100:]+train[:10]", as_supervised=True, data_dir=tmp_path)
    wanted = Counter(image.tobytes() for image in [*images[100:], *images[:10]])
    copied = pickle.loads(pickle.dumps(dataset))
    for shuffled in (dataset.global_shuffle(seed=1), dataset.shuffle(30, seed=1), copied):
        found = list(shuffled.as_numpy_iterator())
        assert Counter(image.tobytes() for image, _ in found) == wanted
    order = [label for _, label in dataset.global_shuffle(seed=1).as_numpy_iterator()]
    assert order != [*labels[100:], *labels[:10]]
    picked = dataset.shard(7, 3).skip(2).take(3)
    np.testing.assert_array_equal([image[..., 0] for image, _ in picked.as_numpy_iterator()], images[[117, 124, 131]])


@pytest.mark.ray
def test_input_workers_read_the_files_themselves(tmp_path: Path, ray_cluster: Any) -> None:
    images, labels = write_idx(tmp_path, "train", 64, ".gz")
    options = rd.Options(num_input_workers=2)
    batches = rd.load("mnist", "train[50%:]", data_dir=tmp_path).shuffle(32, seed=3).batch(8).with_options(options)
    found = [image for batch in batches.as_numpy_iterator() for image in batch["image"]]
    assert Counter(image.tobytes() for image in found) == Counter(image.tobytes() for image in images[32:])

    class Rows(rd.DatasetBuilder):
        name = "test_rows_on_workers"

        def splits(self) -> Mapping[str, Callable[[], Any]]:
            wide = np.random.default_rng(0).integers(0, 1 << 62, (48, 1 << 15))  # 12 MB: several chunks
            return {"train": lambda: rd.Dataset.from_tensor_slices({"row": np.arange(48), "x": wide})}

    written = Rows(tmp_path).as_dataset("train[41:]+train[20:23]").with_options(options)
    assert [int(row["row"]) for row in written.as_numpy_iterator()] == [*range(41, 48), 20, 21, 22]


def test_cifar(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    records = np.concatenate([write_cifar(folder / f"data_batch_{number}.bin", 10 + number) for number in range(1, 6)])
    write_cifar(folder / "test_batch.bin", 4)
    dataset, info = rd.load("cifar10", "train[5:60]", with_info=True, data_dir=tmp_path)
    assert (info.splits, info.class_names["label"][3]) == ({"train": 65, "test": 4}, "cat")
    for row, example in enumerate(dataset.as_numpy_iterator(), start=5):
        pixels = records[row, 1:].reshape(3, 32, 32)
        np.testing.assert_array_equal(example["image"], np.stack([*pixels], axis=-1))
        assert example["label"] == records[row, 0]
    labels = {
        int(label) for _, label in rd.load("cifar10", "train", as_supervised=True, data_dir=tmp_path).global_shuffle()
    }
    assert labels == {*range(10)}
    fine = write_cifar(tmp_path / "test.bin", 6, num_labels=2)
    found = list(rd.load("cifar100", "test", data_dir=tmp_path).as_numpy_iterator())
    assert [list(row) for row in found[:1]] == [["image", "coarse_label", "label"]]
    np.testing.assert_array_equal([row["label"] for row in found], fine[:, 1])


def test_missing_files_are_named_with_checksums_and_their_source(tmp_path: Path) -> None:
    with pytest.raises(rd.NotFoundError) as caught:
        rd.load("fashion_mnist", "train", data_dir=tmp_path)
    message = str(caught.value)
    for part in (
        "train-images-idx3-ubyte.gz (MD5 8d4fb7e6c68d591d4c3dfef9ec88bf0d)",
        "2 of them are not in",
        str(tmp_path / "FashionMNIST/raw"),
        "downloads nothing: get them from http://fashion-mnist",
    ):
        assert part in message
    write_idx(tmp_path, "train", 5)
    assert rd.load("mnist", data_dir=tmp_path).keys() == {"train"}
    with pytest.raises(rd.NotFoundError, match="t10k-images.*for the split 'test'"):
        rd.load("mnist", "train+test[:3]", data_dir=tmp_path)
    with pytest.raises(rd.NotFoundError, match=r"data_batch_3\.bin.*cifar-10-binary\.tar\.gz \(SHA-256 c4a38c50"):
        rd.load("cifar10", "train", data_dir=tmp_path)
    with pytest.raises(rd.NotFoundError, match="The files of a data set must exist"):
        rd.load("cifar10", "train", files={"train": tmp_path / "none.bin"})
    with pytest.raises(rd.InvalidArgumentError, match="config of 'emnist' must be one of byclass"):
        rd.load("emnist/greek", "train", data_dir=tmp_path)


def damaged(content: bytes, kind: str) -> bytes:
    return {"short": content[:-3], "long": content + b"abc", "magic": b"\1" + content[1:], "head": content[:6]}[kind]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("kind", ["short", "long", "magic", "head"])
def test_damaged_idx_files_are_named(tmp_path: Path, kind: str, suffix: str) -> None:
    write_idx(tmp_path, "train", 10, suffix)
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    content = gzip.decompress(path.read_bytes()) if suffix else path.read_bytes()
    path.write_bytes(gzip.compress(damaged(content, kind)) if suffix else damaged(content, kind))
    with pytest.raises(rd.DataLossError) as caught:
        list(rd.load("mnist", "train", data_dir=tmp_path))
    assert caught.value.path == str(path)


def test_other_damage(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", 10, ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)
    dataset = rd.load("mnist", "train", data_dir=tmp_path)
    for _ in range(2):  # each row is an error; the file is not read again for each
        assert len(list(dataset.ignore_errors())) == 0
    with pytest.raises(rd.DataLossError) as caught:
        next(iter(dataset))
    assert caught.value.path == str(path)
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((9, 28, 28)))))
    with pytest.raises(rd.DataLossError, match="a label for each of the 9 images in .* got 10"):
        rd.load("mnist", "train", data_dir=tmp_path)
    write_cifar(tmp_path / "test.bin", 3, num_labels=2)
    (tmp_path / "test.bin").write_bytes((tmp_path / "test.bin").read_bytes()[:-1])
    with pytest.raises(rd.DataLossError, match="must have records of 3074 bytes"):
        rd.load("cifar100", "test", data_dir=tmp_path)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", 1000)
    dataset = rd.load("mnist", "train", data_dir=tmp_path)
    next(iter(dataset))
    with open(tmp_path / "train-images-idx3-ubyte", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(rd.DataLossError, match="must not change while a dataset reads it"):
        list(dataset)


def write_pictures(root: Path, counts: dict[str, int]) -> dict[str, Any]:
    image = pytest.importorskip("PIL.Image")
    pictures: dict[str, Any] = {}
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(len(pictures)).integers(0, 256, (4 + number, 6, 3), np.uint8)
            path = root / folder / f"{number}.png"
            image.fromarray(pixels).save(path)
            pictures[str(path)] = pixels
    return pictures


def test_folders_of_images(tmp_path: Path) -> None:
    pictures = list(write_pictures(tmp_path, {"train/cat": 3, "train/dog": 2, "test/dog": 1}).values())
    (tmp_path / "train" / "notes.txt").write_text("no image")
    dataset, info = rd.load("image_folder", "train", data_dir=tmp_path, with_info=True)
    assert (info.splits, info.class_names) == ({"test": 1, "train": 5}, {"label": ("cat", "dog")})
    found = list(dataset.as_numpy_iterator())
    assert [row["label"] for row in found] == [0, 0, 0, 1, 1]
    for row, pixels in zip(found, pictures, strict=False):
        np.testing.assert_array_equal(row["image"], pixels)
    pairs = rd.load("image_folder", "test+train[-1:]", as_supervised=True, data_dir=tmp_path)
    assert [int(label) for _, label in pairs] == [1, 1]
    assert sorted(int(label) for _, label in pairs.global_shuffle(seed=1)) == [1, 1]
    flat = rd.load("image_folder", data_dir=tmp_path / "train")
    assert {split: len(dataset) for split, dataset in flat.items()} == {"train": 5}


def test_a_slice_of_a_folder_opens_no_other_image(tmp_path: Path) -> None:
    write_pictures(tmp_path, {"cat": 3, "dog": 3})
    (tmp_path / "cat" / "0.png").write_bytes(b"no image")
    (tmp_path / "dog" / "2.png").unlink()
    (tmp_path / "dog" / "2.png").write_bytes(b"")
    dataset = rd.load("image_folder", "train[1:5]", as_supervised=True, data_dir=tmp_path)
    assert [int(label) for _, label in dataset] == [0, 0, 1, 1]
    whole = iter(rd.load("image_folder", "train", data_dir=tmp_path))
    with pytest.raises(rd.DataLossError) as caught:
        next(whole)
    assert caught.value.path == str(tmp_path / "cat" / "0.png")
    assert int(next(whole)["label"]) == 0
    with pytest.raises(rd.NotFoundError, match="folder of images must exist"):
        rd.load("image_folder", "train", data_dir=tmp_path / "none")
    with pytest.raises(rd.InvalidArgumentError, match="must have a folder for each class"):
        rd.load("image_folder", "train", data_dir=tmp_path / "cat")


def test_slices_are_datasets_as_others_are(tmp_path: Path) -> None:
    """Wherever they run: the same elements, resumable at each of them."""
    write_idx(tmp_path, "train", 30)
    write_idx(tmp_path, "t10k", 6, ".gz")
    write_cifar(tmp_path / "test.bin", 9, num_labels=2)
    write_pictures(tmp_path / "pictures", {"cat": 3, "dog": 3})
    for name, spec, supervised, folder in [
        ("mnist", "train[20%:50%]+test[1:]", True, tmp_path),
        ("mnist", "train[3:3]", False, tmp_path),
        ("cifar100", "test[-4:]", True, tmp_path),
        ("image_folder", "train[2:5]+train[:1]", True, tmp_path / "pictures"),
        ("diabetes", "train[99%:]", False, tmp_path),
    ]:

        def make(
            name: str = name, spec: str = spec, supervised: bool = supervised, folder: Path = folder
        ) -> rd.Dataset:
            options: dict[str, Any] = {} if name == "diabetes" else {"data_dir": folder}
            found: rd.Dataset = rd.load(name, spec, as_supervised=supervised, **options)
            return found

        check_op(make)
        check_op(lambda make=make: make().shuffle(4, seed=1).repeat(2))  # type: ignore[misc]
        check_op(lambda make=make: make().global_shuffle(seed=2))  # type: ignore[misc]
