"""The base class of data sets that are read from files which users have."""

from __future__ import annotations

import glob
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.datasets.builder import DatasetBuilder, Examples
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.stored.fingerprint import fingerprint


@dataclass(frozen=True)
class SourceFile:
    """A file of a data set, which has one of several names, and the published checksum of the first."""

    names: tuple[str, ...]
    checksum: str = ""

    def __str__(self) -> str:
        return self.names[0] + (f" ({self.checksum})" if self.checksum else "")


class FileBuilder(DatasetBuilder):
    """A data set of files that are never downloaded: the error names them.

    Args:
        data_dir: See :class:`DatasetBuilder`; the files lie in it, or in a folder of it with a usual name.
        config: See :class:`DatasetBuilder`.
        files: Instead of looking in `data_dir`: the files of each split, by name of the split.
    """

    source: ClassVar[str] = ""
    """The address, and the archive with its checksum, from which the files come."""
    folders: ClassVar[tuple[str, ...]] = ()
    """Folders of `data_dir` in which the files may lie, beside `data_dir` itself and the one of the data set's name."""

    def __init__(self, data_dir: Any = None, config: str | None = None, files: Mapping[str, Any] | None = None) -> None:
        super().__init__(data_dir, config)
        if files is not None and not isinstance(files, Mapping):
            raise InvalidArgumentError(f"files= must be a dict of the files of each split, got {files!r:.200}.")
        self._files = {split: _paths(given) for split, given in (files or {}).items()}

    @abstractmethod
    def source_files(self) -> Mapping[str, Sequence[SourceFile]]:
        """Return the files of each split."""

    @abstractmethod
    def examples(self, split: str, paths: Sequence[str]) -> Examples:
        """Return the examples of a split, which has these files."""

    def files_beside(self, path: str) -> list[str]:
        """Return other files that are read with the file `path`."""
        return []

    def as_dataset(self, split: Any = None, as_supervised: bool = False) -> Any:
        for name in self.source_files():
            if isinstance(split, str) and name not in self._found() and re.search(rf"\b{name}\b", split):
                self._require(name)
        return super().as_dataset(split, as_supervised)

    def splits(self) -> Mapping[str, Callable[[], Examples]]:
        return {split: partial(self._examples_of, split) for split in self._found()}

    def _examples_of(self, split: str) -> Examples:
        return self.examples(split, self._require(split))

    def cache_key(self) -> str:
        """Return a fingerprint of the names, sizes and times of the files; the last one, if the files are gone."""
        try:
            paths = [(split, path) for split in self._found() for path in self._require(split)]
        except NotFoundError:
            kept = glob.glob(os.path.join(self._prepared_folder(), f"{glob.escape(self.version)}-*"))
            if not kept:
                raise
            return max(kept, key=os.path.getmtime).rpartition("-")[2]
        paths += [(split, beside) for split, path in paths for beside in self.files_beside(path)]
        states = [(split, path, os.stat(path)) for split, path in paths]
        return fingerprint([(split, path, state.st_size, state.st_mtime_ns) for split, path, state in states])[:12]

    def _found(self) -> list[str]:
        """Return the splits with files; all splits, of which the first will be reported, if there is none."""
        if self._files:
            return list(self._files)
        wanted = self.source_files()
        return [split for split, files in wanted.items() if all(map(self._path_of, files))] or list(wanted)

    def _require(self, split: str) -> list[str]:
        """Return the paths of the files of a split. Raises NotFoundError if one is missing."""
        if split in self._files:
            return self._files[split]
        files = self.source_files()[split]
        paths = [path for path in map(self._path_of, files) if path is not None]
        if len(paths) < len(files):
            raise NotFoundError(
                f"The data set {self.name!r} needs the files {', '.join(map(str, files))} for the split {split!r}, and "
                f"{len(files) - len(paths)} of them are not in {' or '.join(map(repr, self._folders()))}. raydist "
                f"downloads nothing: get them from {self.source}, and give their folder as data_dir, or the files of "
                "each split as files=."
            )
        return paths

    def _folders(self) -> list[str]:
        return [self.data_dir, *(os.path.join(self.data_dir, folder) for folder in (self.name, *self.folders))]

    def _path_of(self, file: SourceFile) -> str | None:
        places = (os.path.join(folder, name) for folder in self._folders() for name in file.names)
        return next((place for place in places if os.path.isfile(place)), None)


def _paths(given: Any) -> list[str]:
    several = isinstance(given, list | tuple)
    paths = [path_text(path) for path in (given if several else [given])]
    for path in paths:
        if not os.path.isfile(path):
            raise NotFoundError(f"The files of a data set must exist, got {path!r}. Check files=.")
    if not paths:
        raise InvalidArgumentError(f"files= needs at least one file for each split, got {given!r}.")
    return paths
