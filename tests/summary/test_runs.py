"""Graphs and hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboardX.proto.graph_pb2 import GraphDef

import raydist as rd
from raydist.summary.media import Text
from raydist.summary.runs import GraphData, Hyperparameters, module_tree
from tests.summary.reading import curves


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


def test_the_tree_of_modules_without_inputs(tmp_path: Path) -> None:
    assert graph_of(tmp_path, torch.nn.Sequential(torch.nn.ReLU())) == ["Sequential/0"]


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


def test_a_module_without_parts_is_one() -> None:
    assert [node.name for node in GraphDef.FromString(module_tree(torch.nn.ReLU())).node] == ["ReLU"]


def test_the_first_replica_speaks_for_all() -> None:
    assert Text(("a",)).merged([Text(("b",))]) == Text(("a",))
    assert Hyperparameters({"lr": 0.1}).merged([Hyperparameters({})]) == Hyperparameters({"lr": 0.1})
    assert GraphData(b"one").merged([GraphData(b"two")]) == GraphData(b"one")


def test_sizes_are_known() -> None:
    assert Text(("a" * 1000,)).num_bytes > 1000
    assert GraphData(b"g" * 1000).num_bytes > 1000
