"""Scalars, histograms, graphs and hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboardX.proto.graph_pb2 import GraphDef
from tensorboardX.writer import SummaryWriter as Peer

import raydist as rd
from raydist.summary.histograms import HistogramCounts, bucket_edges, counted
from raydist.summary.runs import module_tree
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


def test_a_replica_without_rows_has_no_say_whatever_it_says() -> None:
    assert ScalarValue(math.nan, 0.0).merged([ScalarValue(5.0, 2.0)]) == ScalarValue(5.0, 2.0)


def test_where_nobody_has_rows_all_weigh_the_same() -> None:
    assert ScalarValue(1.0, 0.0).merged([ScalarValue(3.0, 0.0)]) == ScalarValue(2.0, 0.0)


def expected(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Counts by numpy, in all buckets."""
    return np.histogram(values.astype(np.float64), bins=np.concatenate([[-np.inf], bucket_edges()]))[0]


def dense(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = counted(values)
    counts = np.zeros(len(bucket_edges()), np.int64)
    counts[found.first : found.first + len(found.counts)] = found.counts
    return counts


def test_every_float32_is_counted_where_a_search_finds_it() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    edges = bucket_edges()[np.abs(bucket_edges()) < 3e38].astype(np.float32)
    around = np.concatenate([edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-np.inf))])
    values = np.concatenate([bits[np.isfinite(bits)], around, np.array([0.0, -0.0], np.float32)])
    assert (dense(values) == expected(values)).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.uint8, np.bool_])
def test_numbers_of_every_type_are_counted(dtype: Any) -> None:
    values = np.arange(-3, 4).astype(dtype)
    found = counted(values.reshape(7, 1))
    assert (dense(values) == expected(values.astype(np.float64))).all()
    assert (found.total, found.squares) == (float(values.sum()), float(np.square(values.astype(float)).sum()))
    assert (found.least, found.most) == (float(values.min()), float(values.max()))


def test_what_is_not_finite_is_left_out_and_told() -> None:
    found = counted(np.array([np.nan, np.inf, -np.inf, 1.0]))
    assert (found.num_values, found.left_out, found.total) == (1, 3, 1.0)
    assert counted(np.array([np.nan])).num_values == 0
    assert counted(np.zeros(0)).left_out == 0


def test_edges_are_those_of_tensorboard() -> None:
    theirs = Peer(write_to_disk=False).default_bins
    assert bucket_edges()[1:-1].tolist() == theirs
    assert bucket_edges()[0] == -np.finfo(np.float64).max
    assert bucket_edges()[-1] == np.finfo(np.float64).max


def test_histograms_together_are_that_of_all_values() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=50), np.zeros(0), rng.normal(size=3) * 100]
    first, *others = map(counted, parts)
    joined, whole = first.merged(others), counted(np.concatenate(parts))
    assert isinstance(joined, HistogramCounts)
    assert joined.buckets() == whole.buckets()
    assert (joined.least, joined.most, joined.num_values) == (whole.least, whole.most, 53)
    assert joined.total == pytest.approx(whole.total)
    assert joined.squares == pytest.approx(whole.squares)


def test_buckets_begin_before_the_first_that_is_filled_and_empty_ones_are_one() -> None:
    buckets = counted(np.array([1.0, 1.0, 5.0])).buckets()
    assert [count for _, count in buckets] == [0.0, 2.0, 0.0, 1.0]
    ends = [end for end, _ in buckets]
    assert ends[0] < 1.0 < ends[1] < ends[2] < 5.0 < ends[3]


def test_of_no_values_there_is_one_empty_bucket() -> None:
    nothing = counted(np.zeros(0))
    joined = nothing.merged([nothing])
    assert isinstance(joined, HistogramCounts)
    assert joined.buckets() == [(1e-12, 0.0)]


class Branches(torch.nn.Module):
    """Torch can't trace it with what it is given."""

    def forward(self, x: Any) -> Any:
        raise KeyError("no such branch")


def graph_of(logdir: Path, module: torch.nn.Module, inputs: Any = None) -> list[str]:
    with rd.summary.create_file_writer(logdir) as writer, writer.as_default():
        assert rd.summary.graph(module, inputs)
    return [node.name for node in curves(logdir).accumulator.Graph().node]


def test_operations_that_torch_traces(tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(3)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), norm)
    assert norm.num_batches_tracked is not None
    names = graph_of(tmp_path, net, torch.ones(4, 2))
    assert any("Linear" in name for name in names)
    assert int(norm.num_batches_tracked) == 0


def test_the_tree_of_modules_where_it_cannot_be_traced(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"tree of submodules of Branches, because .*no such branch"):
        assert graph_of(tmp_path, Branches(), torch.ones(1)) == ["Branches"]


def test_what_is_no_module() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="graph needs a torch.nn.Module, got function"):
        rd.summary.graph(lambda x: x)  # type: ignore[arg-type]  # that is what is tried


def test_hyperparameters_of_all_kinds(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        given = {"lr": 0.1, "layers": 3, "bias": True, "name": "net", "np": np.float32(2), "torch": torch.tensor(1.0)}
        assert rd.summary.hparams(given, metrics=["epoch_loss"])
    found = curves(tmp_path).accumulator
    assert set(found.PluginTagToContent("hparams")) >= {"_hparams_/experiment", "_hparams_/session_start_info"}


@pytest.mark.parametrize("given", [{"layers": [1, 2]}, {"net": None}])
def test_hyperparameters_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"hparams\['.*'\] must be a number, a bool or a str, got"):
        rd.summary.hparams(given)


def test_hyperparameters_have_names() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="hparams must be a dict, and metrics a list"):
        rd.summary.hparams([1, 2])  # type: ignore[arg-type]  # that is what is tried


def test_each_innermost_module_is_a_node() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.ReLU()))
    found = GraphDef.FromString(module_tree(net))
    assert [(node.name, node.op) for node in found.node] == [("Sequential/0", "Linear"), ("Sequential/1/0", "ReLU")]
    assert b"weight (3, 2)" in found.node[0].attr["parameters"].s
