"""Scalars."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.summary.scalars import ScalarValue
from tests.summary.reading import curves


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[rd.summary.SummaryWriter]:
    with rd.summary.create_file_writer(tmp_path) as made, made.as_default(step=0):
        yield made


@pytest.mark.parametrize("data", [1.5, np.float32(1.5), np.array([1.5]), torch.tensor(1.5), torch.tensor([[1.5]])])
def test_one_number_of_any_kind(data: Any, writer: rd.summary.SummaryWriter) -> None:
    assert rd.summary.scalar("x", data)
    writer.flush()
    assert curves(writer.logdir).scalars("x") == [(0, 1.5)]


@pytest.mark.parametrize("data", ["one", torch.ones(2), np.zeros(0), None, 1j])
def test_what_is_not_one_number(data: Any, writer: rd.summary.SummaryWriter) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="scalar 'x' must be one number, got"):
        rd.summary.scalar("x", data)


def test_a_parameter_with_its_graph_is_a_number(writer: rd.summary.SummaryWriter) -> None:
    assert rd.summary.scalar("x", torch.nn.Parameter(torch.tensor(2.0)) * 3)


@pytest.mark.parametrize("op", ["max", rd.ReduceOp.MIN])
def test_other_reductions(op: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="reduce_op of a scalar must be MEAN or SUM, got M"):
        rd.summary.scalar("x", 1.0, reduce_op=op)


@pytest.mark.parametrize("data", [torch.ones(2, 3, dtype=torch.bfloat16), [[1, 2], [3, 4]], torch.eye(2).to_sparse()])
def test_a_histogram_of_any_numbers(data: Any, writer: rd.summary.SummaryWriter) -> None:
    assert rd.summary.histogram("x", data)


def test_a_histogram_of_what_are_none(writer: rd.summary.SummaryWriter) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="histogram 'x' must be of real numbers, got complex64"):
        rd.summary.histogram("x", torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_must_be_text(name: Any, writer: rd.summary.SummaryWriter) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="name of a summary must be a str, got"):
        rd.summary.scalar(name, 1.0)


def test_without_a_writer_nothing_is_looked_at() -> None:
    assert not rd.summary.scalar("x", torch.ones(2))
    assert not rd.summary.histogram("x", "no numbers")


def test_a_mean_weighs_rows() -> None:
    assert ScalarValue(1.0, 3.0).merged([ScalarValue(5.0, 1.0)]) == ScalarValue(2.0, 4.0)


def test_a_replica_without_rows_has_no_say_whatever_it_says() -> None:
    assert ScalarValue(math.nan, 0.0).merged([ScalarValue(5.0, 2.0)]) == ScalarValue(5.0, 2.0)


def test_where_nobody_has_rows_all_weigh_the_same() -> None:
    assert ScalarValue(1.0, 0.0).merged([ScalarValue(3.0, 0.0)]) == ScalarValue(2.0, 0.0)


def test_a_sum_adds_whatever_they_weigh() -> None:
    total = ScalarValue(1.0, 3.0, is_sum=True).merged([ScalarValue(5.0, 0.0, is_sum=True)])
    assert total == ScalarValue(6.0, 3.0, is_sum=True)


def test_infinities_stay() -> None:
    assert ScalarValue(math.inf).merged([ScalarValue(1.0)]) == ScalarValue(math.inf, 2.0)


def test_a_tensor_is_read_when_it_is_settled() -> None:
    assert ScalarValue(torch.tensor(0.5)).settled() == ScalarValue(0.5)
