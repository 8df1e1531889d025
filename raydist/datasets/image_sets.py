"""The MNIST family, CIFAR, and folders of images."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import DataLossError, InvalidArgumentError, NotFoundError
from raydist.dataset import Dataset
from raydist.datasets.array_files import cifar_op, idx_op
from raydist.datasets.builder import DatasetBuilder, Examples
from raydist.datasets.file_builder import FileBuilder, SourceFile
from raydist.datasets.rows import Rows, joined_rows
from raydist.image.decode import decode_image
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats.files import data_loss, read_file

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")


def _classes(names: str) -> Mapping[str, tuple[str, ...]]:
    return {"label": tuple(names.split(","))}


class IdxBuilder(FileBuilder):
    """Images of grey pixels, uint8 of shape (28, 28, 1), and their labels, in idx files, compressed by gzip or not."""

    supervised_keys = ("image", "label")
    is_prepared = False
    checksums: ClassVar[str] = ""
    """MD5 of the images and labels for training, and of the images and labels for tests."""

    def file_prefixes(self) -> Mapping[str, str]:
        """Return the beginning of the names of a split's files."""
        return {"train": "train", "test": "t10k"}

    def source_files(self) -> Mapping[str, Sequence[SourceFile]]:
        sums = iter(self.checksums.split())
        return {
            split: [_idx_file(f"{prefix}-{what}", next(sums, "")) for what in ("images-idx3", "labels-idx1")]
            for split, prefix in self.file_prefixes().items()
        }

    def examples(self, split: str, paths: Sequence[str]) -> Examples:
        if len(paths) != 2:
            raise InvalidArgumentError(
                f"files= needs the file of images and the file of labels for each split, got {paths} for {split!r}."
            )
        return Dataset(idx_op(*paths))


def _idx_file(stem: str, checksum: str) -> SourceFile:
    dotted = ".".join(stem.rsplit("-", 1))
    names = (f"{stem}-ubyte.gz", f"{stem}-ubyte", f"{dotted}-ubyte", f"{dotted}-ubyte.gz")
    return SourceFile(names, f"MD5 {checksum}" if checksum else "")


@final
class Mnist(IdxBuilder):
    """60,000 images of handwritten digits for training and 10,000 for tests, 28 x 28 grey pixels."""

    name = "mnist"
    homepage = "http://yann.lecun.com/exdb/mnist/"
    source = "https://ossci-datasets.s3.amazonaws.com/mnist/"
    folders = ("MNIST/raw",)
    class_names = _classes("0,1,2,3,4,5,6,7,8,9")
    checksums = """f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432
        9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c"""


@final
class FashionMnist(IdxBuilder):
    """60,000 images of clothing for training and 10,000 for tests, 28 x 28 grey pixels, in 10 classes."""

    name = "fashion_mnist"
    homepage = "https://github.com/zalandoresearch/fashion-mnist"
    source = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    folders = ("FashionMNIST/raw",)
    class_names = _classes("T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot")
    checksums = """8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe
        bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310"""


@final
class KMnist(IdxBuilder):
    """60,000 images of Japanese characters for training and 10,000 for tests, 28 x 28 grey pixels."""

    name = "kmnist"
    homepage = "https://github.com/rois-codh/kmnist"
    source = "http://codh.rois.ac.jp/kmnist/dataset/kmnist/"
    folders = ("KMNIST/raw",)
    class_names = _classes("o,ki,su,tsu,na,ha,ma,ya,re,wo")
    checksums = """bdb82020997e1d708af4cf47b453dcf7 e144d726b3acfaa3e44228e80efcd344
        5c965bf0a639b31b8f53240b1b52f4d7 7320c461ea6c1c855c0b718fb2a4b134"""


@final
class EMnist(IdxBuilder):
    """Images of handwritten digits and letters, 28 x 28 grey pixels; as stored, with rows and columns exchanged."""

    name = "emnist"
    homepage = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
    source = "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip (MD5 58c8d27c78d21e728a6bc7b3cc06412e)"
    folders = ("EMNIST/raw", "gzip")

    def file_prefixes(self) -> Mapping[str, str]:
        config = self.config or "balanced"
        known = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")
        if config not in known:
            raise InvalidArgumentError(f"The config of 'emnist' must be one of {', '.join(known)}, got {config!r}.")
        return {split: f"emnist-{config}-{split}" for split in ("train", "test")}


class _CifarBuilder(FileBuilder):
    """Images of 32 x 32 colour pixels, uint8 of shape (32, 32, 3), in CIFAR's binary version."""

    supervised_keys = ("image", "label")
    homepage = "https://www.cs.toronto.edu/~kriz/cifar.html"
    is_prepared = False
    label_keys: ClassVar[tuple[str, ...]]

    def examples(self, split: str, paths: Sequence[str]) -> Examples:
        files = [Dataset(cifar_op(path, self.label_keys)) for path in paths]
        return joined_rows([Rows(dataset, 0, len(dataset)) for dataset in files])


@final
class Cifar10(_CifarBuilder):
    """50,000 colour images for training and 10,000 for tests, 32 x 32 pixels, in 10 classes."""

    name = "cifar10"
    source = (
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz (SHA-256 "
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd)"
    )
    folders = ("cifar-10-batches-bin",)
    label_keys = ("label",)
    class_names = _classes("airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck")

    def source_files(self) -> Mapping[str, Sequence[SourceFile]]:
        train = [SourceFile((f"data_batch_{number}.bin",)) for number in range(1, 6)]
        return {"train": train, "test": [SourceFile(("test_batch.bin",))]}


@final
class Cifar100(_CifarBuilder):
    """50,000 colour images for training and 10,000 for tests, 32 x 32 pixels, in 100 classes of 20 groups."""

    name = "cifar100"
    source = (
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz (SHA-256 "
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec)"
    )
    folders = ("cifar-100-binary",)
    label_keys = ("coarse_label", "label")

    def source_files(self) -> Mapping[str, Sequence[SourceFile]]:
        return {split: [SourceFile((f"{split}.bin",))] for split in ("train", "test")}


@final
class ImageFolder(DatasetBuilder):
    """JPEG and PNG files in a folder for each class: `<data_dir>/<split>/<class>/*`, or `<data_dir>/<class>/*`.

    Args:
        data_dir: The folder.
        config: Not used.
        channels: Channels of the decoded images, as for `rd.image.decode_image`.
    """

    name = "image_folder"
    supervised_keys = ("image", "label")
    is_prepared = False

    def __init__(self, data_dir: Any = None, config: str | None = None, channels: int = 3) -> None:
        super().__init__(data_dir, config)
        self._channels = channels

    def splits(self) -> Mapping[str, Callable[[], Examples]]:
        folders = _split_folders(self.data_dir)
        names = {name for folder in folders.values() for name in _folders_in(folder)}
        self.class_names = {"label": tuple(sorted(names))}
        return {split: partial(self._images, folder) for split, folder in folders.items()}

    def _images(self, folder: str) -> Dataset:
        files = [
            (os.path.join(folder, name, file), label)
            for label, name in enumerate(self.class_names["label"])
            for file in _images_in(os.path.join(folder, name))
        ]
        spec = {"image": TensorSpec((None, None, self._channels or None), np.uint8), "label": TensorSpec((), np.int64)}
        return Dataset.from_torch(ImageFiles(tuple(files), self._channels), spec, num_parallel_calls=None)


@final
@dataclass(frozen=True)
class ImageFiles:
    """Images and labels, as a map-style dataset."""

    files: tuple[tuple[str, int], ...]
    channels: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        path, label = self.files[index]
        try:
            return {"image": decode_image(read_file(path), self.channels), "label": label}
        except (DataLossError, InvalidArgumentError) as error:
            raise data_loss(path, 0, f"The file must be an image, but: {error}") from error


def _split_folders(root: str) -> Mapping[str, str]:
    """Return the folder of each split: of several, or of "train" alone if the folders in `root` hold images."""
    if not os.path.isdir(root):
        raise NotFoundError(
            f"The folder of images must exist, got {root!r}. Give as data_dir the folder that has one folder for each "
            "split, or each class."
        )
    inside = {name: os.path.join(root, name) for name in _folders_in(root)}
    if any(_images_in(folder) for folder in inside.values()):
        return {"train": root}
    if not inside:
        raise InvalidArgumentError(f"A folder of images must have a folder for each class, got {root!r} without any.")
    return inside


def _folders_in(path: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def _images_in(path: str) -> list[str]:
    names = os.listdir(path) if os.path.isdir(path) else ()
    return sorted(name for name in names if name.lower().endswith(_IMAGE_SUFFIXES))
