"""`rd.DatasetBuilder`: a data set, its splits, and the directory into which it is written once."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, final

from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.dataset import Dataset
from raydist.datasets.rows import Rows, Supervised, joined_rows
from raydist.datasets.split_specs import parse_split
from raydist.pipelines.formats.files import data_loss, local_file, read_file
from raydist.pipelines.stored.file_directory import LocalFiles, is_file_name, require_file_name, sync_directory

Examples = Dataset | Iterable[Any]
"""A dataset, or examples that can be iterated over: dicts of numbers, arrays, str and bytes."""

SupervisedKeys = tuple[str | tuple[str, ...] | None, str]
"""Keys of features (one, several, or None for all others) and of the label."""

_INFO_FILE = "dataset_info.json"
_DATA_DIR = "RAYDIST_DATA_DIR"
_USUAL_DATA_DIR = os.path.join("~", ".cache", "raydist", "datasets")


@final
@dataclass(frozen=True)
class DatasetInfo:
    """A description of a data set.

    Attributes:
        name: Name of the data set.
        version: Version of the data set.
        description: The first paragraph of the docstring of its class.
        homepage: Address of its source; may be empty.
        features: Nest of `rd.TensorSpec` of one example.
        supervised_keys: Keys of the features (one, or several for a dict of them; None for all others) and of the label
            for `as_supervised`; None if there is no label.
        class_names: Names of the classes, by key of the label.
        splits: Number of examples of each split.
    """

    name: str
    version: str
    description: str
    homepage: str
    features: Any
    supervised_keys: SupervisedKeys | None
    class_names: Mapping[str, tuple[str, ...]]
    splits: Mapping[str, int]

    def num_examples(self, split: str) -> int:
        """Return the number of examples of a split spec.

        Args:
            split: The spec, as for `rd.load`.

        Raises:
            InvalidArgumentError: The spec is invalid.

        Source: tfds.core.SplitInfo.num_examples.

        >>> rd.builder("iris").info.num_examples("train[:80%]")
        120
        """
        return sum(map(len, parse_split(split, list(self.splits), self.splits.__getitem__)))


class DatasetBuilder(ABC):
    """The base class of data sets, of those with a name in raydist and of your own.

    A subclass has a `name`, which `rd.load` finds once the class is defined, and a method `splits`. What the splits
    yield is written to `data_dir` once, as Parquet with checksums, and read from there ever after. The directory
    appears when everything is on disk: a process that dies leaves none, and of several that prepare the data set at the
    same time the first to finish wins. If `is_prepared` is False, nothing is written, and the datasets of `splits` are
    read.

    Args:
        data_dir: The directory of data sets. None: that of the environment variable RAYDIST_DATA_DIR, or
            `~/.cache/raydist/datasets`.
        config: A variant of the data set, where it has any: the part of a name behind "/" or ":".

    Attributes:
        name: Name of the data set.
        version: Version of what is written: with another version, it is written anew.
        homepage: Address of the source for `info`.
        supervised_keys: See :class:`DatasetInfo`.
        class_names: Names of the classes, by key of the label.
        is_prepared: False if the datasets of `splits` are read as they are.
        data_dir: The directory of data sets.
        config: The variant, or None.

    Source: tfds.core.GeneratorBasedBuilder.

    >>> import tempfile
    >>> class Squares(rd.DatasetBuilder):
    ...     name = "squares"
    ...     supervised_keys = ("x", "square")
    ...
    ...     def splits(self):
    ...         numbers = [{"x": x, "square": x * x} for x in range(10)]
    ...         return {"train": lambda: numbers[:8], "test": lambda: numbers[8:]}
    >>> ds = rd.load("squares", split="train[75%:]", as_supervised=True, data_dir=tempfile.mkdtemp())
    >>> [(int(x), int(square)) for x, square in ds]
    [(6, 36), (7, 49)]
    """

    name: ClassVar[str]
    version: ClassVar[str] = "1.0.0"
    homepage: ClassVar[str] = ""
    supervised_keys: SupervisedKeys | None = None
    class_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    is_prepared: ClassVar[bool] = True

    def __init__(self, data_dir: Any = None, config: str | None = None) -> None:
        given = os.environ.get(_DATA_DIR, _USUAL_DATA_DIR) if data_dir is None else data_dir
        self.data_dir = os.path.abspath(os.path.expanduser(local_file(given, "A data set")))
        self.config = config
        self._opened: dict[str, Dataset] = {}

    @abstractmethod
    def splits(self) -> Mapping[str, Callable[[], Examples]]:
        """Return for each split, by name, a function without arguments that returns its examples.

        Examples are a `rd.Dataset`, or anything that can be iterated over, such as a generator; the first three show
        the spec (`rd.Dataset.from_generator` declares one). Where nothing is written, they must be a dataset with a
        known number of elements.
        """

    def cache_key(self) -> str:
        """Return text that changes when what is written must be written anew, such as sizes of files. May be empty."""
        return ""

    @property
    def info(self) -> DatasetInfo:
        """The description of the data set. Prepares the data set, if that has to be done."""
        names = self._split_names()
        return DatasetInfo(
            self.name if self.config is None else f"{self.name}/{self.config}",
            self.version,
            (inspect.getdoc(type(self)) or "").partition("\n\n")[0],
            self.homepage,
            self._open(names[0]).element_spec,
            self.supervised_keys,
            dict(self.class_names),
            {name: self._count(name) for name in names},
        )

    def prepare(self) -> None:
        """Write the data set to `data_dir`. Does nothing if it is there, or if nothing is to be written.

        Raises:
            NotFoundError: Files of the data set are missing.
            FailedPreconditionError: `data_dir` cannot be written to.
            Exception: The error of an example: nothing is written.

        Source: tfds.core.DatasetBuilder.download_and_prepare.
        """
        target = self._prepared_path()
        if self.is_prepared and not os.path.isdir(target):
            _write_once(target, self._examples)

    def as_dataset(self, split: Any = None, as_supervised: bool = False) -> Any:
        """Return the examples of splits.

        Args:
            split: See `rd.load`.
            as_supervised: See `rd.load`.

        Returns:
            A `rd.Dataset`, or a list, tuple or dict of datasets, like `split`.

        Raises:
            InvalidArgumentError: A split spec is invalid, or there is no label for `as_supervised`.
            NotFoundError: Files of the data set are missing.
            DataLossError: A file is damaged.

        Source: tfds.core.DatasetBuilder.as_dataset.

        >>> [len(ds) for ds in rd.builder("iris").as_dataset(["train[:90%]", "train[90%:]"])]
        [135, 15]
        """
        if isinstance(split, Mapping):
            return {key: self.as_dataset(each, as_supervised) for key, each in split.items()}
        if isinstance(split, list | tuple):
            return type(split)(self.as_dataset(each, as_supervised) for each in split)
        if split is None:
            return self.as_dataset({name: name for name in self._split_names()}, as_supervised)
        ranges = parse_split(split, self._split_names(), self._count)
        rows = [Rows(self._open(each.split), each.start, each.stop) for each in ranges]
        return joined_rows(rows, self._supervised() if as_supervised else None)

    def _supervised(self) -> Supervised:
        if self.supervised_keys is None:
            raise InvalidArgumentError(
                f"as_supervised needs a data set with a label, and {self.name!r} has no supervised_keys. Leave it out, "
                "and make pairs in a map."
            )
        return Supervised(*self.supervised_keys)

    @cached_property
    def _examples(self) -> Mapping[str, Callable[[], Examples]]:
        found = self.splits()
        if not found:
            raise InvalidArgumentError(f"splits of {self.name!r} must return one split at least, got {found!r}.")
        return found

    def _split_names(self) -> list[str]:
        if not self.is_prepared:
            return list(self._examples)
        self.prepare()
        return _prepared_splits(self._prepared_path())

    def _open(self, split: str) -> Dataset:
        if split not in self._opened:
            path = os.path.join(self._prepared_path(), split)
            found = Dataset.load(path) if self.is_prepared else self._examples[split]()
            if not isinstance(found, Dataset):
                raise InvalidArgumentError(
                    f"The splits of {self.name!r} must be datasets, because nothing is written, got {found!r:.100} for "
                    f"{split!r}. Return a rd.Dataset, or set is_prepared = True."
                )
            self._opened[split] = found
        return self._opened[split]

    def _count(self, split: str) -> int:
        count = self._open(split).cardinality()
        if count < 0:
            raise InvalidArgumentError(
                f"The split {split!r} of {self.name!r} must have a known number of elements, and has not. Add "
                "assert_cardinality(n) to its dataset, or set is_prepared = True."
            )
        return count

    def _prepared_path(self) -> str:
        return os.path.join(self._prepared_folder(), "-".join(filter(None, (self.version, self.cache_key()))))

    def _prepared_folder(self) -> str:
        return os.path.join(self.data_dir, "prepared", self.name, self.config or "")


def _prepared_splits(path: str) -> list[str]:
    """Return the names of the splits of a prepared data set."""
    file = os.path.join(path, _INFO_FILE)
    try:
        splits = json.loads(read_file(file))["splits"]
        if not all(map(is_file_name, splits)):
            raise ValueError(f"its splits are {splits!r:.200}")
        return list(splits)
    except (NotFoundError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"The description of a prepared data set must be intact, but {error!r}. Remove the directory {path!r}"
        raise data_loss(file, 0, problem) from error


def _write_once(target: str, examples: Mapping[str, Callable[[], Examples]]) -> None:
    """Write all splits into a hidden directory, and rename it. Another writer may finish first."""
    parent, name = os.path.split(target)
    LocalFiles(parent).make()
    ours = f".{name}.{socket.gethostname()}."
    _remove_remains(parent, ours)
    hidden = os.path.join(parent, f"{ours}{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        LocalFiles(hidden).make()
        for split in examples:
            require_file_name(split)
        for split, make in examples.items():
            made = make()
            dataset = made if isinstance(made, Dataset) else Dataset.from_torch(_Repeated(make))
            dataset.save(os.path.join(hidden, split), compression="ZSTD", format="parquet")
        LocalFiles(hidden).replace(_INFO_FILE, json.dumps({"splits": list(examples)}).encode())
        try:
            os.rename(hidden, target)
        except OSError:
            if not os.path.isdir(target):  # else another writer has finished first
                raise
        sync_directory(parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _remove_remains(parent: str, ours: str) -> None:
    """Remove the hidden directories of processes of this machine that have died."""
    for entry in os.listdir(parent):
        pid, *_ = entry.removeprefix(ours).split(".")
        if entry.startswith(ours) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)


@dataclass(frozen=True)
class _Repeated:
    """Examples that can be iterated over twice: once for their spec."""

    make: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())
