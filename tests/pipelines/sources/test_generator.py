from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import raydist as rd
from raydist.core.errors import SpecError
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.sources.generator import Signature
from tests.contracts.op import check_op, collect

INT = rd.TensorSpec((), "int64")


def count(stop: int) -> Iterator[int]:
    yield from range(stop)


def test_yields_the_generators_values() -> None:
    dataset = rd.Dataset.from_generator(
        lambda: iter([(1, [0.5, 1.5]), (2, [])]), output_signature=(INT, rd.TensorSpec((None,), "float32"))
    )
    assert [(int(x), y.tolist()) for x, y in dataset] == [(1, [0.5, 1.5]), (2, [])]
    assert dataset.element_spec == (INT, rd.TensorSpec((None,), "float32"))
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    got: list[Any] = []

    def values(*args: Any) -> list[int]:
        got.extend(args)
        return []

    assert list(rd.Dataset.from_generator(values, output_signature=INT, args=(3, [1.5], "text", np.int32(4)))) == []
    assert [type(value) for value in got] == [np.int64, np.ndarray, str, np.int32]
    assert [got[0], got[1].tolist(), got[2], got[3]] == [3, [1.5], "text", 4]


def test_is_called_afresh_for_every_pass_and_must_not_become_shorter_to_be_resumed() -> None:
    sizes: list[int] = []

    def values() -> Iterator[int]:
        sizes.append(13 - 3 * len(sizes))
        yield from range(sizes[-1])

    dataset = rd.Dataset.from_generator(values, output_signature=INT)
    assert sizes == []
    assert [int(x) for x in dataset] == list(range(13))
    assert [int(x) for x in dataset.repeat(2)] == [*range(10), *range(7)]
    iterator = dataset.as_numpy_iterator()
    collect(iterator, 3)
    resumed = dataset.as_numpy_iterator()
    resumed.load_state_dict(iterator.state_dict())
    with pytest.raises(rd.FailedPreconditionError, match="the same values again to resume after 3 of them, .* after 1"):
        next(resumed)


def failing() -> Iterator[int]:
    yield 0
    yield 1
    raise KeyError("mine")


def broken() -> Iterator[int]:
    raise OSError("no such camera")


def test_an_exception_keeps_its_type_and_ends_the_iteration() -> None:
    dataset = rd.Dataset.from_generator(failing, output_signature=INT)
    iterator = iter(dataset)
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    with pytest.raises(KeyError, match="mine") as caught:
        next(iterator)
    assert any("from_generator(test_generator.py:" in n and "failing), element 2." in n for n in caught.value.__notes__)
    assert caught.traceback[-1].name == "failing"
    assert list(iterator) == []
    check_op(lambda: dataset, [np.int64(0), np.int64(1), ("KeyError", "'mine'")])
    check_op(lambda: rd.Dataset.from_generator(broken, output_signature=INT), [("OSError", "no such camera")])


def test_a_value_that_does_not_fit_is_an_error_at_its_place() -> None:
    dataset = rd.Dataset.from_generator(lambda: [1, "two", [3], 4], output_signature=INT)
    first, second, third, fourth = collect(dataset.as_numpy_iterator())
    assert (first, fourth) == (1, 4)
    assert second[0] == third[0] == "SpecError"
    assert f"must yield {INT}, as its output_signature says, got TensorSpec(shape=(), dtype=str) ('two')" in second[1]
    assert "got TensorSpec(shape=(1,), dtype=int64) ([3])" in third[1]
    check_op(lambda: dataset)


def test_a_slow_generator_is_not_waited_for() -> None:
    made = []

    def values() -> Iterator[int]:
        for i in range(1000):
            made.append(i)
            time.sleep(0.03)
            yield i

    iterator = iter(rd.Dataset.from_generator(values, output_signature=INT).skip(0))
    assert [int(next(iterator)) for _ in range(4)] == [0, 1, 2, 3]
    assert len(made) < 20
    iterator.close()


def test_a_buffer_that_is_used_again_and_close_ends_the_generator() -> None:
    ended = []

    def values() -> Iterator[np.ndarray[Any, Any]]:
        buffer = np.zeros(2, np.int64)
        try:
            for i in itertools.count():
                buffer[:] = i
                yield buffer
        finally:
            ended.append(True)

    dataset = rd.Dataset.from_generator(values, output_signature=rd.TensorSpec((2,), "int64"))
    iterator = iter(dataset.batch(3))
    assert next(iterator).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert ended == []
    iterator.close()
    assert ended == [True]


def test_bad_arguments() -> None:
    cases: list[tuple[Any, Any, str]] = [
        (count(3), INT, "needs a function .* Give the generator function itself"),
        ([1, 2], INT, "needs a function"),
        (count, None, "needs output_signature="),
        (count, "int64", "output_signature must be a nest of rd.TensorSpec, got a leaf 'int64'"),
        (count, (TensorSpec(), 3), "output_signature must"),
        (count, {}, "output_signature must"),
        (count, (), "output_signature must"),
    ]
    for generator, signature, message in cases:
        with pytest.raises(TypeError, match=message):
            rd.Dataset.from_generator(generator, output_signature=signature)
    no_iterator = rd.Dataset.from_generator(lambda: 5, output_signature=INT)
    with pytest.raises(rd.SpecError, match=r"from_generator\(.*\) must return an iterator, got 5"):
        next(iter(no_iterator))


def fit(spec: TensorSpec, value: Any) -> Any:
    (leaf,) = Signature.parse(spec).leaves(value)
    return leaf


def test_scalars_become_the_declared_dtype() -> None:
    cases: list[tuple[Any, Any, Any]] = [
        ("int64", 3, 3),
        ("uint8", 255, 255),
        ("int32", np.int64(-5), -5),
        ("float32", 3, 3.0),
        ("float64", 0.1, 0.1),  # not through float32
        ("float32", torch.tensor(0.5), 0.5),
        ("int64", np.True_, 1),
        ("complex64", 1.5, 1.5 + 0j),
        (bytes, b"a\0", b"a\0"),
        (str, "ä", "ä"),
        ("torch.int64", 1, 1),
    ]
    for dtype, value, expected in cases:
        spec = TensorSpec((), dtype)
        leaf = fit(spec, value)
        assert leaf == expected, (dtype, value)
        assert isinstance(leaf, bytes | str) or leaf.dtype == spec.dtype, (dtype, value)


def test_another_dtype_or_shape_is_shown() -> None:
    dtypes: list[tuple[Any, Any, str]] = [
        ("int64", 1.0, "float32"),
        ("uint8", 256, "int64"),
        ("uint8", -1, "int64"),
        ("int64", 2**63, "A Python int must fit into int64"),
        ("bool", 1, "int64"),
        ("float32", 1j, "complex128"),
        (bytes, "text", "str"),
        (str, b"bytes", "bytes"),
        (str, ["a", 1], "must hold one type"),
        ("int64", [[1], [1, 2]], "must be rectangular"),
        ("int64", None, "of type builtins.NoneType"),
    ]
    shapes: list[tuple[Any, Any]] = [((), [1]), ((2,), 1), ((2,), [1, 2, 3]), ((None,), [[1]]), ((0,), [1])]
    cases = [(TensorSpec(None, dtype), value, shown) for dtype, value, shown in dtypes]
    for shape, value in shapes:
        cases.append((TensorSpec(shape, "int64"), value, str(TensorSpec(np.shape(value), "int64"))))
    for spec, value, shown in cases:
        with pytest.raises(SpecError) as caught:
            fit(spec, value)
        assert f"must yield {spec}, as its output_signature says, got " in str(caught.value)
        assert shown in str(caught.value)


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("three")
        return {"x": torch.tensor(index * index), "name": str(index)}


class Stream(IterableDataset[Any]):
    def __init__(self, length: int = 4) -> None:
        self.length = length

    def __len__(self) -> int:
        return 99  # estimates are allowed

    def __iter__(self) -> Iterator[Any]:
        buffer = torch.zeros(2)
        for i in range(self.length):
            yield buffer.fill_(i), i


def test_map_style_is_read_by_index() -> None:
    dataset = rd.Dataset.from_torch(TensorDataset(torch.arange(6).reshape(3, 2), torch.tensor([0.0, 1.0, 2.0])))
    assert len(dataset) == 3
    assert dataset.element_spec == (rd.TensorSpec((2,), "int64"), rd.TensorSpec((), "float32"))
    expected = [(np.array([2 * i, 2 * i + 1]), np.float32(i)) for i in range(3)]
    found = [(x.tolist(), float(y)) for x, y in dataset]
    assert found == [(x.tolist(), float(y)) for x, y in expected]
    check_op(lambda: dataset.shuffle(3).batch(2))
    for calls in (1, None, 2):
        check_op(lambda calls=calls: rd.Dataset.from_torch(Squares(), num_parallel_calls=calls))  # type: ignore[misc]


def test_iterable_style_is_iterated_afresh() -> None:
    dataset = rd.Dataset.from_torch(Stream())
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    assert dataset.element_spec == (rd.TensorSpec((2,), "float32"), rd.TensorSpec((), "int64"))
    assert [(x.tolist(), int(i)) for x, i in dataset.repeat(2)] == [([i, i], i) for i in range(4)] * 2
    assert "from_torch-0: from_torch(Stream)" in dataset.explain()
    check_op(lambda: rd.Dataset.from_torch(Stream()).batch(3))


def test_an_empty_stream_needs_a_signature() -> None:
    with pytest.raises(rd.FailedPreconditionError, match=r"from_torch\(Stream\) is that of its first sample"):
        _ = rd.Dataset.from_torch(Stream(0)).element_spec
    signature = (rd.TensorSpec((None,), "float32"), rd.TensorSpec((), "int64"))
    assert list(rd.Dataset.from_torch(Stream(0), signature)) == []
    assert rd.Dataset.from_torch(Stream(0), signature).element_spec == signature
    with pytest.raises(rd.SpecError, match=r"from_torch needs a dataset with __getitem__.*got 3 \(int\)"):
        rd.Dataset.from_torch(3)
