from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import pytest

import raydist as rd
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.sources.file_format import TableFormat, TableReader
from raydist.pipelines.sources.table_files import TableFilesOp, table_paths
from tests.contracts.op import check_op


@final
class WordReader(TableReader):
    """A path is its own content: every letter a row, "-" nothing, "!" an error, "X" one that ends the file."""

    def __init__(self, word: str, at: int = 0) -> None:
        self._word, self._at = word, at
        self.ended = at >= len(word)

    def position(self) -> list[int]:
        return [self._at]

    def read(self, limit: int) -> list[Item]:
        part = self._word[self._at : self._at + 2]  # two at a time, whatever is asked for
        self._at += len(part)
        self.ended = self._at >= len(self._word) or "X" in part
        return [item for letter in part for item in self._items(letter)]

    def _items(self, letter: str) -> list[Item]:
        if letter in "!X":
            return [ElementError(rd.DataLossError(f"{letter} in {self._word}"))]
        return [] if letter == "-" else [block_of_rows([letter])]

    def close(self) -> None:
        self.ended = True


@final
@dataclass(frozen=True)
class WordFormat(TableFormat):
    name: ClassVar[str] = "from_words"
    label: str = "loud"
    spec: Any = rd.TensorSpec((), str)

    def open(self, path: str, position: Sequence[int]) -> TableReader:
        if path == "missing":
            raise rd.NotFoundError("missing")
        return WordReader(path, *position)


def words(*paths: str, count: int = rd.UNKNOWN_CARDINALITY) -> rd.Dataset:
    return rd.Dataset(TableFilesOp(paths, WordFormat(), count))


def test_any_format_keeps_the_contract() -> None:
    errors = [("NotFoundError", "missing"), ("DataLossError", "! in c!d"), ("DataLossError", "X in eXf--")]
    expected = ["a", "b", "c", errors[1], "d", errors[0], "e", errors[2], "g"]
    check_op(lambda: words("ab", "", "-", "c!d", "missing", "eXf--", "---", "g-"), expected)
    check_op(lambda: words("abc", "d", count=4), list("abcd"))
    check_op(lambda: words("abc", "d").repeat(2).batch(3))


def test_properties() -> None:
    dataset = words("a", "b", "c", count=3)
    assert (len(dataset), dataset.element_spec) == (3, rd.TensorSpec((), str))
    assert "from_words-0: from_words('a' and 2 more, loud)" in dataset.explain()


def test_a_state_of_more_files_is_refused() -> None:
    first = words("a", "b", "c").as_numpy_iterator()
    next(first), next(first), next(first)
    other = words("a").as_numpy_iterator()
    other.load_state_dict(first.state_dict())
    with pytest.raises(rd.FailedPreconditionError, match="it is of file 3, and from_words has 1 files"):
        next(other)


def test_paths() -> None:
    assert table_paths("a", "x") == ("a",)
    assert table_paths(np.array(["a", "b"]), "x") == ("a", "b")
    with pytest.raises(rd.InvalidArgumentError, match="from_x needs at least one path, got an empty list"):
        table_paths([], "from_x")
    with pytest.raises(rd.SpecError, match="got 3"):
        table_paths([3], "from_x")
