from __future__ import annotations

import torch
from tensorboardX.proto.graph_pb2 import GraphDef

from raydist.summaries.module_tree import module_tree


def test_each_innermost_module_is_a_node() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.ReLU()))
    found = GraphDef.FromString(module_tree(net))
    assert [(node.name, node.op) for node in found.node] == [("Sequential/0", "Linear"), ("Sequential/1/0", "ReLU")]
    assert b"weight (3, 2)" in found.node[0].attr["parameters"].s


def test_a_module_without_parts_is_one() -> None:
    assert [node.name for node in GraphDef.FromString(module_tree(torch.nn.ReLU())).node] == ["ReLU"]
