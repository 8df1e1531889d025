from __future__ import annotations

import functools
import pickle
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
from raydist.pipelines.elements.tensor_functions import TensorFunction, is_module, with_tensors


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


def test_bfloat16_is_torchs() -> None:
    ds = Dataset.from_tensor_slices(torch.ones(2, 3).bfloat16()).map(with_tensors(lambda x: x + x.sum()))
    assert [(x.dtype, x.tolist()) for x in ds] == [(torch.bfloat16, [4.0, 4.0, 4.0])] * 2
    ds = Dataset.from_tensor_slices(torch.ones(2).bfloat16()).map(torch.nn.Identity())
    assert [x.dtype for x in ds] == [torch.bfloat16] * 2


def test_what_may_not_be_written_to_is_copied() -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with_tensors(lambda x: x.add_(1))(frozen)
    assert frozen.tolist() == [0, 0]


def test_a_tuple_is_unpacked_into_tensors() -> None:
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


@pytest.mark.ray
def test_modules_on_input_workers(ray_cluster: object) -> None:
    layer = torch.nn.Linear(1, 1)
    rows = torch.arange(4.0).reshape(4, 1)
    ds = Dataset.from_tensor_slices(rows).map(layer).with_options(rd.Options(num_input_workers=1))
    torch.testing.assert_close(torch.stack(list(ds)), layer(rows).detach())
    wrapped = Dataset.from_tensor_slices(rows).map(with_tensors(torch.neg)).with_options(ds.options())
    torch.testing.assert_close(torch.stack(list(wrapped)), -rows)
    failing = Dataset.from_tensor_slices(rows).map(lambda x: torch.neg(x)).with_options(ds.options())
    with pytest.raises(TypeError) as raised:
        next(iter(failing))
    assert any("rd.with_tensors" in note for note in raised.value.__notes__)


def test_a_module_and_a_wrapped_function_may_ask_for_rng() -> None:
    noisy = Noisy()
    assert wants_rng(noisy)
    assert wants_rng(with_tensors(noisy))
    assert wants_rng(with_tensors(lambda x, *, rng: x))
    assert not wants_rng(torch.nn.Linear(1, 1))
    ds = Dataset.from_tensor_slices([1.0, 2.0]).map(noisy, seed=3)
    drawn = Dataset.from_tensor_slices([1.0, 2.0]).map(lambda x, *, rng: 2 * x + rng.random(), seed=3)
    assert [float(x) for x in ds] == pytest.approx([float(x) for x in drawn])


@pytest.mark.parametrize(
    "use",
    [
        lambda ds, fn: ds.filter(with_tensors(lambda x: bool(torch.is_tensor(x)))),
        lambda ds, fn: ds.take_while(with_tensors(torch.is_tensor)),
        lambda ds, fn: ds.scan(0, with_tensors(lambda s, x: (s + x, fn(x)))),
        lambda ds, fn: ds.flat_map(with_tensors(lambda x: Dataset.from_tensors(fn(x)))),
        lambda ds, fn: ds.group_by_window(
            with_tensors(lambda x: int(torch.is_tensor(x))), with_tensors(lambda key, w: w.map(with_tensors(fn))), 2
        ),
        lambda ds, fn: ds.bucket_by_sequence_length(
            with_tensors(lambda x: 1 * torch.is_tensor(x)), [5], [1, 1]
        ).unbatch(),
        lambda ds, fn: ds.rejection_resample(
            with_tensors(lambda x: 1 - 1 * torch.is_tensor(x)), [1.0], [1.0], seed=1
        ).map(lambda kind, x: x),
    ],
)
def test_wherever_functions_are_given(use: Any) -> None:
    def same(x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return x

    assert [int(x) for x in use(Dataset.range(4), same)] == [0, 1, 2, 3]


def test_reduce_gets_tensors_too() -> None:
    assert int(Dataset.range(4).reduce(0, with_tensors(lambda total, x: torch.add(total, x)))) == 6
    assert float(Dataset.range(3).map(float).reduce(np.zeros((), np.float32), Adds())) == 3


class Speechless:
    def __str__(self) -> str:
        raise ValueError("numpy. Tensor")


def raises(error: Exception) -> None:
    raise error


class Adds(torch.nn.Module):
    def forward(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.add(total, x)


def test_scan_with_a_module() -> None:
    class Both(torch.nn.Module):
        def forward(self, state: torch.Tensor, x: torch.Tensor) -> Any:
            return torch.add(state, x), torch.neg(x)

    assert [int(x) for x in Dataset.range(3).scan(0, Both())] == [0, -1, -2]


@pytest.mark.parametrize(
    ("fn", "element"),
    [
        (torch.relu, np.ones(2)),
        (lambda x: F.relu(x), np.float32(1)),
        (lambda x: F.conv2d(x, torch.ones(1, 1, 1, 1)), np.ones((1, 1, 2, 2), np.float32)),
        (lambda x: torch.stack([x, x]), np.ones(2)),
        (lambda x: x.unsqueeze(0), np.ones(2)),
        (lambda x: x.float(), np.int64(1)),
        (functools.partial(torch.nn.Linear(2, 2)), np.ones(2, np.float32)),
        (torch.nn.Linear(2, 2).forward, np.ones(2, np.float32)),
    ],
)
def test_errors_of_torch_that_met_numpy_name_the_way_out(fn: Any, element: Any) -> None:
    (result,), failed = call_rows(fn, block_of_rows([element]), 0)
    assert isinstance(result, ElementError)
    assert failed == [0]
    assert any("rd.with_tensors" in note for note in getattr(result.error, "__notes__", ())), result.error


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + "a",
        lambda x: x.no_such_thing,
        lambda x: torch.ones(2) @ torch.ones(3),
        lambda x: with_tensors(lambda y: y.no_such_thing)(x),
        lambda x: {"a": x}["numpy.Tensor"],
        lambda x: raises(TypeError(Speechless())),
        lambda x: len(3),  # type: ignore[arg-type]  # the point of this test
    ],
)
def test_other_errors_do_not(fn: Any) -> None:
    (result,), _ = call_rows(fn, block_of_rows([np.ones(2)]), 0)
    assert isinstance(result, ElementError)
    assert getattr(result.error, "__notes__", ()) == ()


def test_the_note_comes_with_scan_and_reduce_as_well() -> None:
    with pytest.raises(TypeError) as raised:
        next(iter(Dataset.range(2).scan(0, lambda total, x: (total, torch.relu(x)))))
    assert any("rd.with_tensors" in note for note in raised.value.__notes__)
    with pytest.raises(TypeError) as raised:
        Dataset.range(2).reduce(0, lambda total, x: torch.relu(x))
    assert any("rd.with_tensors" in note for note in raised.value.__notes__)


def test_a_wrapped_function_keeps_its_label_and_pickles() -> None:
    wrapped = rd.with_tensors(kinds)
    assert function_label(wrapped) == function_label(kinds)
    assert with_tensors(wrapped) is wrapped
    assert pickle.loads(cloudpickle.dumps(with_tensors(lambda x: x + 1)))(np.int64(1)) == 2
    assert isinstance(wrapped, TensorFunction)


def test_another_function_inside_is_another_cache(tmp_path: Path) -> None:
    def sums(add: int) -> list[int]:
        ds = Dataset.range(2).map(with_tensors(lambda x: torch.add(x, add)), num_parallel_calls=1)
        return [int(x) for x in ds.snapshot(str(tmp_path))]

    assert (sums(1), sums(1), sums(2)) == ([1, 2], [1, 2], [2, 3])


def test_what_is_no_function_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="with_tensors needs a function, got 3"):
        with_tensors(3)  # type: ignore[arg-type]  # the point of this test


def test_modules_are_known() -> None:
    assert is_module(torch.nn.Linear(1, 1))
    assert not is_module(torch.nn.Linear)
    assert not is_module(torch.relu)
