from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import raydist as rd
from raydist.training.given_data import distributed
from tests.training.toys import regression

X, Y = np.arange(70.0)[:, None], np.arange(70)


def one_device() -> rd.OneDeviceStrategy:
    return rd.OneDeviceStrategy("cpu")


def given(*args: Any, **more: Any) -> rd.DistributedDataset:
    return distributed(one_device(), *args, **more)


def rows_of(data: Any) -> list[list[int]]:
    """The targets of each batch; every x must still be beside its y."""
    batches = list(data)
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    return [y.tolist() for _, y in batches]


def test_arrays_come_in_batches_of_32_in_their_order() -> None:
    assert rows_of(given(X, Y)) == [[*range(32)], [*range(32, 64)], [*range(64, 70)]]
    assert [len(batch) for batch in rows_of(given(X, Y, batch_size=40))] == [40, 30]


def test_tensors_are_arrays_whatever_they_require() -> None:
    assert rows_of(given(torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y))) == rows_of(given(X, Y))


def test_a_shuffle_is_new_in_every_epoch_and_follows_torchs_seed() -> None:
    def epochs() -> list[list[list[int]]]:
        torch.manual_seed(7)
        data = given(X, Y, shuffle=True)
        return [[y.tolist() for _, y in data] for _ in range(2)]

    first, second = epochs()
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == [*range(70)]
    assert first != second
    assert first != rows_of(given(X, Y))
    assert epochs() == [first, second]
    assert rows_of(given(X, Y, shuffle=True)) not in (first, second)


def test_a_dataset_is_taken_as_it_is_by_either_name() -> None:
    data = one_device().distribute_dataset(regression(5, 2))
    assert given(data) is data
    assert given(None, dataset=data, shuffle=True) is data
    assert given(regression(5, 2)).cardinality() == 3


def test_a_loader_is_taken_over() -> None:
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=50)
    assert rows_of(given(loader)) == [[*range(50)], [*range(50, 70)]]


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        ((regression(4, 2), 5), {}, r"y must be the targets .* got 5\. .*epochs=5"),
        (
            (regression(4, 2), Y),
            {},
            r"y belongs to arrays, and a Dataset comes without it.* elements are \(x, y\)",
        ),
        ((regression(4, 2),), {"batch_size": 8}, "batch_size belongs to arrays, .*batched already"),
        ((DataLoader([1]), Y), {}, "y belongs to arrays, and a DataLoader comes without it"),  # type: ignore[arg-type]  # a list is a dataset to torch
        ((X,), {}, r"fit needs targets beside an array x, got none: fit\(x, y\)"),
        ((X,), {"what": "evaluate"}, r"evaluate needs targets .*evaluate\(x, y\)"),
        ((None,), {}, "fit takes its data once, as x, got None and None"),
        ((X, Y), {"dataset": regression(4, 2)}, "fit takes its data once"),
        ((X, Y), {"batch_size": 0}, "batch_size must be a number of rows >= 1, got 0"),
        ((regression(4, 2), [rd.History()]), {}, r"by their name: callbacks=\[...\]"),
        ((X,), {"batch_size": [rd.History()], "what": "predict"}, "predict takes callbacks by their name"),
        ((X, Y[:5]), {}, "70.*5|5.*70"),
    ],
)
def test_arguments_that_do_not_go_together_say_what_to_write(args: Any, more: Any, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        given(*args, **more)


@pytest.mark.parametrize("x", ["files", [1.0, 2.0], np.float64(1.0), {"a": X, "b": 3}])
def test_what_is_no_data_is_named(x: Any) -> None:
    with pytest.raises(
        rd.SpecError, match=r"x must be a raydist.Dataset of global batches, .* got (str|list|float64|int)"
    ):
        given(x, Y)
