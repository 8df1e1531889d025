"""Batches that are no tensors of rows: graphs of torch_geometric."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric
from torch import nn
from torch.nn import functional as F

import raydist as rd
from tests.hub.harness import (
    BATCH,
    ROWS,
    assert_same,
    assert_trained,
    seeded,
    train_on_replicas,
    train_plainly,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


Element = dict[str, np.ndarray]


def graph(index: int) -> Element:
    """A ring of three to six nodes with a label."""
    draw = np.random.default_rng(index)
    num = 3 + index % 4
    ring = np.stack([np.arange(num), (np.arange(num) + 1) % num])
    return {"x": draw.standard_normal((num, 4)), "edges": ring, "y": np.asarray(index % 2)}


def joined(elements: list[Element]) -> torch_geometric.data.Batch:
    """The graphs as one with several components, as torch_geometric's DataLoader makes it."""
    graphs = []
    for each in elements:
        x, edges, y = (torch.as_tensor(each[name]) for name in ("x", "edges", "y"))
        graphs.append(torch_geometric.data.Data(x=x, edge_index=edges, y=y[None]))
    return torch_geometric.data.Batch.from_data_list(graphs)


class GraphClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch_geometric.nn.GCNConv(4, 8)
        self.second = torch_geometric.nn.GCNConv(8, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.first(batch.x, batch.edge_index).tanh()
        return torch_geometric.nn.global_mean_pool(self.second(hidden, batch.edge_index), batch.batch)


def make_classifier() -> Any:
    return GraphClassifier().double()


def graph_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch), batch.y)


def test_graphs(two: rd.MirroredStrategy) -> None:
    batches = [joined([graph(k) for k in range(at, min(at + BATCH, ROWS))]) for at in range(0, ROWS, BATCH)]
    plain = train_plainly(seeded(make_classifier), batches, graph_loss)
    assert_trained(seeded(make_classifier).state_dict(), plain)
    data = rd.Dataset.range(ROWS).map(lambda k: graph(int(k))).batch(BATCH, collate=joined)
    model = train_on_replicas(two, make_classifier, data, graph_loss)
    assert_same(model.state_dict(), plain.state_dict())
