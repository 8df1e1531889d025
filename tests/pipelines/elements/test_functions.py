"""Calls of users' functions: labels, random generators, arguments and tensors."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.pipelines.elements.functions import call_rows, function_label, wants_rng
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.seeds import RandomKey, trim_epoch
from raydist.pipelines.elements.tensor_functions import TensorFunction, with_tensors


class Scale:
    def __call__(self, x: Any) -> Any:
        return x * 2


def augment(x: Any, *, rng: np.random.Generator) -> Any:
    return x + rng.random()


def test_describe_names_file_line_and_function() -> None:
    assert function_label(augment) == f"test_functions.py:{augment.__code__.co_firstlineno} augment"
    assert function_label(functools.partial(augment, 1)) == function_label(augment)
    assert function_label(Scale()).endswith("Scale")
    assert function_label(Scale()).startswith("test_functions.py:")
    assert function_label(len) == "len"


def test_only_a_keyword_only_rng_is_wanted() -> None:
    def plain(x: int, y: int = 1, *, scale: int = 2, rng: object) -> int:
        return x

    @functools.wraps(plain)
    def wrapper(*args: int, **keywords: object) -> int:
        return 1

    wanting: list[Callable[..., Any]] = [plain, wrapper, functools.partial(plain, scale=3)]
    others: list[Callable[..., Any]] = [lambda x, rng: x, lambda rng: rng, lambda x, *, seed: x, lambda **rng: rng, len]
    assert [wants_rng(fn) for fn in wanting] == [True] * 3
    assert [wants_rng(fn) for fn in others] == [False] * 5


class Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, *, rng: np.random.Generator) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return x * self.scale + rng.random()


def kinds(*values: Any) -> str:
    return " ".join(type(value).__name__ for value in values)


def test_every_array_and_number_is_a_tensor_of_its_dtype() -> None:
    seen: list[Any] = []
    value = {"x": np.ones(2, np.float16), "n": np.int64(3), "b": np.True_, "text": "a", "raw": b"a"}
    with_tensors(seen.append)((value, np.array(["a"], object)))
    fields, texts = seen[0]
    assert (fields["x"].dtype, fields["n"].dtype, fields["b"].dtype) == (torch.float16, torch.int64, torch.bool)
    assert (fields["n"].shape, fields["text"], fields["raw"], texts.tolist()) == ((), "a", b"a", ["a"])


def test_what_may_not_be_written_to_is_copied_and_a_tuple_unpacked() -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with_tensors(lambda x: x.add_(1))(frozen)
    assert frozen.tolist() == [0, 0]
    ds = Dataset.from_tensor_slices(([1, 2], [1.0, 2.0], ["a", "b"])).map(with_tensors(kinds))
    assert list(ds) == ["Tensor Tensor str"] * 2


def test_modules_receive_tensors_as_they_are() -> None:
    layer = torch.nn.Linear(2, 1)
    rows = torch.arange(6.0).reshape(3, 2)
    expected = layer(rows).detach()
    assert torch.equal(torch.stack(list(Dataset.from_tensor_slices(rows).map(layer))), torch.stack([*map(layer, rows)]))
    torch.testing.assert_close(next(iter(Dataset.from_tensor_slices(rows).batch(3).map(layer))), expected)
    torch.testing.assert_close(
        torch.stack(list(Dataset.from_tensor_slices(rows).map_batches(torch.nn.Sequential(layer), 2))), expected
    )


def test_a_module_and_a_wrapped_function_may_ask_for_rng() -> None:
    noisy = Noisy()
    assert wants_rng(noisy)
    assert wants_rng(with_tensors(noisy))
    assert wants_rng(with_tensors(lambda x, *, rng: x))
    assert not wants_rng(torch.nn.Linear(1, 1))
    ds = Dataset.from_tensor_slices([1.0, 2.0]).map(noisy, seed=3)
    drawn = Dataset.from_tensor_slices([1.0, 2.0]).map(lambda x, *, rng: 2 * x + rng.random(), seed=3)
    assert [float(x) for x in ds] == pytest.approx([float(x) for x in drawn])


USES: list[Any] = [
    lambda ds, fn: ds.filter(with_tensors(lambda x: bool(torch.is_tensor(x)))),
    lambda ds, fn: ds.take_while(with_tensors(torch.is_tensor)),
    lambda ds, fn: ds.scan(0, with_tensors(lambda s, x: (s + x, fn(x)))),
    lambda ds, fn: ds.flat_map(with_tensors(lambda x: Dataset.from_tensors(fn(x)))),
    lambda ds, fn: ds.group_by_window(
        with_tensors(lambda x: int(torch.is_tensor(x))), with_tensors(lambda key, w: w.map(with_tensors(fn))), 2
    ),
    lambda ds, fn: ds.bucket_by_sequence_length(with_tensors(lambda x: 1 * torch.is_tensor(x)), [5], [1, 1]).unbatch(),
    lambda ds, fn: ds.rejection_resample(with_tensors(lambda x: 1 - 1 * torch.is_tensor(x)), [1.0], [1.0], seed=1).map(
        lambda kind, x: x
    ),
]


def test_wherever_functions_are_given() -> None:
    def same(x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return x

    for number, use in enumerate(USES):
        assert [int(x) for x in use(Dataset.range(4), same)] == [0, 1, 2, 3], number


class Speechless:
    def __str__(self) -> str:
        raise ValueError("numpy. Tensor")


def raises(x: Any) -> None:
    raise TypeError(Speechless())


TWO = np.ones(2)
MET_NUMPY: list[tuple[Callable[[Any], Any], Any]] = [
    (torch.relu, TWO),
    (lambda x: F.relu(x), np.float32(1)),
    (lambda x: F.conv2d(x, torch.ones(1, 1, 1, 1)), np.ones((1, 1, 2, 2), np.float32)),
    (lambda x: torch.stack([x, x]), TWO),
    (lambda x: x.unsqueeze(0), TWO),
    (lambda x: x.float(), np.int64(1)),
    (functools.partial(torch.nn.Linear(2, 2)), np.ones(2, np.float32)),
    (torch.nn.Linear(2, 2).forward, np.ones(2, np.float32)),
]
OTHER_ERRORS: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda x: x + "a", TWO),
    (lambda x: x.no_such_thing, TWO),
    (lambda x: torch.ones(2) @ torch.ones(3), TWO),
    (lambda x: with_tensors(lambda y: y.no_such_thing)(x), TWO),
    (lambda x: {"a": x}["numpy.Tensor"], TWO),
    (raises, TWO),
    (lambda x: len(3), TWO),  # type: ignore[arg-type]  # the point of this test
]


def test_errors_of_torch_that_met_numpy_name_the_way_out_and_others_do_not() -> None:
    for noted, cases in ((True, MET_NUMPY), (False, OTHER_ERRORS)):
        for number, (fn, element) in enumerate(cases):
            (result,), failed = call_rows(fn, block_of_rows([element]), 0)
            assert isinstance(result, ElementError), number
            assert failed == [0]
            notes = getattr(result.error, "__notes__", ())
            assert any("rd.with_tensors" in note for note in notes) if noted else notes == (), (number, result.error)
    runs: list[Callable[[], Any]] = [
        lambda: next(iter(Dataset.range(2).scan(0, lambda total, x: (total, torch.relu(x))))),
        lambda: Dataset.range(2).reduce(0, lambda total, x: torch.relu(x)),
    ]
    for run in runs:
        with pytest.raises(TypeError) as raised:
            run()
        assert any("rd.with_tensors" in note for note in raised.value.__notes__)


def test_a_wrapped_function_keeps_its_label_and_pickles() -> None:
    wrapped = rd.with_tensors(kinds)
    assert function_label(wrapped) == function_label(kinds)
    assert with_tensors(wrapped) is wrapped
    assert pickle.loads(cloudpickle.dumps(with_tensors(lambda x: x + 1)))(np.int64(1)) == 2
    assert isinstance(wrapped, TensorFunction)
    with pytest.raises(InvalidArgumentError, match="with_tensors needs a function, got 3"):
        with_tensors(3)  # type: ignore[arg-type]  # the point of this test


def test_another_function_inside_is_another_cache(tmp_path: Path) -> None:
    def sums(add: int) -> list[int]:
        ds = Dataset.range(2).map(with_tensors(lambda x: torch.add(x, add)), num_parallel_calls=1)
        return [int(x) for x in ds.snapshot(str(tmp_path))]

    assert (sums(1), sums(1), sums(2)) == ([1, 2], [1, 2], [2, 3])


KEY = RandomKey(3, "map-1", (2,))


def test_a_stream_is_the_same_in_any_pieces_and_another_for_another_key() -> None:
    whole = KEY.words(0, 50)
    for start in range(0, 50, 7):
        assert KEY.words(start, 50 - start).tolist() == whole[start:].tolist()
    others = [RandomKey(4, "map-1", (2,)), RandomKey(3, "map-2", (2,)), RandomKey(3, "map-1", (3,))]
    assert len({tuple(key.words(0, 4).tolist()) for key in (KEY, *others)}) == 4
    assert trim_epoch((0, 0, 2)) == (2,)  # the first pass of a repeat is the epoch itself
    assert RandomKey(1, "a", (0, 1)).words(0, 3).tolist() == RandomKey(1, "a", (1,)).words(0, 3).tolist()
