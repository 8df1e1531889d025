"""Data sets of other packages: scikit-learn's tables, Hugging Face `datasets`, and torchvision."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.core.optional_packages import optional_module
from raydist.dataset import Dataset
from raydist.datasets.builder import DatasetBuilder, Examples, SupervisedKeys
from raydist.pipelines.sources.hub_datasets import saved_splits

_USER = "Data sets of other packages"


class SklearnBuilder(DatasetBuilder):
    """A table that comes with scikit-learn, in memory."""

    is_prepared = False
    homepage = "https://scikit-learn.org/stable/datasets/toy_dataset.html"
    features_key: ClassVar[str] = "features"
    label_key: ClassVar[str] = "label"

    def splits(self) -> Mapping[str, Callable[[], Examples]]:
        module = optional_module("sklearn.datasets", _USER, "scikit-learn")
        found = getattr(module, f"load_{self.name}")()
        features, target = found["images" if self.features_key == "image" else "data"], np.asarray(found["target"])
        if self.label_key == "label":
            self.class_names = {"label": tuple(map(str, found["target_names"]))}
            target = target.astype(np.int64)
        arrays = {self.features_key: np.ascontiguousarray(features), self.label_key: target}
        return {"train": lambda: Dataset.from_tensor_slices(arrays)}


@final
class Digits(SklearnBuilder):
    """1,797 images of handwritten digits, 8 x 8 pixels of 0 to 16."""

    name = "digits"
    features_key = "image"
    supervised_keys = ("image", "label")


@final
class Iris(SklearnBuilder):
    """150 flowers of three kinds of iris: length and width of sepals and petals."""

    name = "iris"
    supervised_keys = ("features", "label")


@final
class Wine(SklearnBuilder):
    """178 wines of three growers: 13 chemical measurements."""

    name = "wine"
    supervised_keys = ("features", "label")


@final
class BreastCancer(SklearnBuilder):
    """569 tumours, malignant or benign: 30 measurements of an image."""

    name = "breast_cancer"
    supervised_keys = ("features", "label")


@final
class Diabetes(SklearnBuilder):
    """442 patients: 10 scaled measurements, and the progress of the disease after a year."""

    name = "diabetes"
    label_key = "target"
    supervised_keys = ("features", "target")


@final
class HuggingFace(DatasetBuilder):
    """A directory that `save_to_disk` of Hugging Face's `Dataset` or `DatasetDict` wrote, or a name on the hub.

    A directory needs no package. A name is looked for in the local cache of `datasets`.

    Args:
        data_dir: Not used.
        config: The directory, or the name.
        subset: The configuration of a data set on the hub that has several.
        download: True fetches a data set that is not in the cache from the hub.
        keys: Columns of features (one, several, or None for all others) and of the label, for `as_supervised`.
    """

    name = "huggingface"
    homepage = "https://huggingface.co/datasets"
    is_prepared = False

    def __init__(
        self,
        data_dir: Any = None,
        config: str | None = None,
        subset: str | None = None,
        download: bool = False,
        keys: SupervisedKeys | None = None,
    ) -> None:
        super().__init__(data_dir, config)
        if config is None:
            raise InvalidArgumentError('"huggingface" needs a directory or a name: write "huggingface:<directory>".')
        self._source, self._subset, self._download = config, subset, download
        self.supervised_keys = keys

    def splits(self) -> Mapping[str, Callable[[], Examples]]:
        if os.path.isdir(self._source):
            paths = saved_splits(self._source)
            return {split: partial(Dataset.from_huggingface, path) for split, path in paths.items()}
        return {str(split): partial(Dataset.from_huggingface, each) for split, each in self._of_hub().items()}

    def _of_hub(self) -> Any:
        datasets = optional_module("datasets", _USER, "'raydist[hub]'")
        if self._download:
            return datasets.load_dataset(self._source, self._subset)
        # `load_dataset` itself asks the hub first, unless the whole process is offline.
        cache = optional_module("datasets.packaged_modules.cache.cache", _USER, "'raydist[hub]'")
        name = self._source.split("/")[-1]
        try:
            kept = cache.Cache(
                repo_id=self._source, dataset_name=name, config_name=self._subset, version="auto", hash="auto"
            )
        except ValueError as error:  # there is none, or there are several configurations
            raise NotFoundError(
                "A data set of Hugging Face must be a directory of save_to_disk, or in the cache of datasets, got "
                f"{self._source!r} ({error!s:.300}). Give the directory, or subset= for one of several "
                f"configurations, or download=True to fetch it from {self.homepage}/{self._source}."
            ) from error
        return kept.as_dataset()


@final
class Torchvision(DatasetBuilder):
    """A data set of torchvision, in the folder `data_dir`, whose samples are images and labels. Images become arrays.

    Args:
        data_dir: Its `root`.
        config: Name of a class of `torchvision.datasets`.
        download: True lets torchvision fetch what is missing.
        split_names: Values of its argument `split`, if it has one.
        options: Further arguments of the class.
    """

    name = "torchvision"
    homepage = "https://docs.pytorch.org/vision/stable/datasets.html"
    supervised_keys = ("image", "label")
    is_prepared = False

    def __init__(
        self,
        data_dir: Any = None,
        config: str | None = None,
        download: bool = False,
        split_names: Sequence[str] = ("train", "test"),
        **options: Any,
    ) -> None:
        super().__init__(data_dir, config)
        self._given = {"root": self.data_dir, **({"download": True} if download else {}), **options}
        self._split_names_given = tuple(split_names)

    def splits(self) -> Mapping[str, Callable[[], Examples]]:
        kind = getattr(optional_module("torchvision.datasets", _USER, "torchvision"), self.config or "", None)
        if not inspect.isclass(kind):
            raise InvalidArgumentError(
                f'"torchvision" needs the name of a class of torchvision.datasets, got {self.config!r}. Write '
                '"torchvision:CIFAR10", say.'
            )
        known = inspect.signature(kind).parameters
        given = {
            name: value for name, value in self._given.items() if name in known or name not in ("root", "download")
        }
        chosen: dict[str, dict[str, Any]] = {"train": {}}
        if "train" in known:
            chosen = {"train": {"train": True}, "test": {"train": False}}
        elif "split" in known and "split" not in given:
            chosen = {name: {"split": name} for name in self._split_names_given}
        return {split: partial(self._open_split, kind, {**given, **more}) for split, more in chosen.items()}

    def _open_split(self, kind: Callable[..., Any], arguments: Mapping[str, Any]) -> Dataset:
        try:
            found = kind(**arguments)
        except (RuntimeError, OSError) as error:
            raise NotFoundError(
                f"The files of torchvision's {self.config} must be in {self.data_dir!r}, and torchvision says: "
                f"{error!s:.300}. Give their folder as data_dir, or download=True."
            ) from error
        return Dataset.from_torch(_TorchvisionSamples(found))  # in one thread: some draw from torch's own generator


@final
@dataclass(frozen=True)
class _TorchvisionSamples:
    """The samples of a dataset of torchvision, as dicts of arrays."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        image, label = self.dataset[index]
        return {"image": np.asarray(image), "label": label}
