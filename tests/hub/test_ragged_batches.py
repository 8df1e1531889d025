"""Batches that are no tensors of rows: images with lists of targets, and graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric
from torch import nn
from torch.nn import functional as F
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import raydist as rd
from tests.hub.harness import (
    BATCH,
    ROWS,
    assert_same,
    assert_trained,
    seeded,
    sgd,
    train_on_replicas,
    train_plainly,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

SIZE = 32
Element = dict[str, np.ndarray]


def image(index: int) -> Element:
    """An image with one to three boxes, each with its label and its mask."""
    draw = np.random.default_rng(index)
    num = 1 + index % 3
    corners = draw.integers(0, SIZE // 2, (num, 2))
    boxes = np.concatenate([corners, corners + draw.integers(6, SIZE // 2, (num, 2))], axis=1).astype(np.float64)
    masks = np.zeros((num, SIZE, SIZE), dtype=np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
        mask[top:bottom, left:right] = 1
    return {"image": draw.random((3, SIZE, SIZE)), "boxes": boxes, "labels": draw.integers(1, 3, num), "masks": masks}


class Backbone(nn.Sequential):
    """Three convolutions in the place of a ResNet."""

    out_channels = 8

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        )


def mask_rcnn() -> Any:
    # Every anchor and every proposal is used: the samplers of torchvision would else draw some of them at random.
    return MaskRCNN(
        Backbone(),
        num_classes=3,
        min_size=SIZE,
        max_size=SIZE,
        rpn_anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)),
        rpn_batch_size_per_image=10_000,
        rpn_positive_fraction=0.99,
        box_batch_size_per_image=10_000,
        box_positive_fraction=0.99,
        box_roi_pool=_pool(4),
        mask_roi_pool=_pool(4),
    ).double()


def _pool(size: int) -> Any:
    return MultiScaleRoIAlign(featmap_names=["0"], output_size=size, sampling_ratio=2)


def detection_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    names = ("boxes", "labels", "masks")
    targets = [dict(zip(names, values, strict=True)) for values in zip(*(batch[name] for name in names), strict=True)]
    losses = model(list(batch["image"]), targets)
    return sum(losses.values())


def test_detection_with_lists_of_targets(two: rd.MirroredStrategy) -> None:
    """The loss is a mean over anchors and boxes; replicas give the mean of theirs, weighted by images."""
    images = [{name: torch.from_numpy(value) for name, value in image(k).items()} for k in range(ROWS)]

    plain = seeded(mask_rcnn)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = sgd(plain)
    for at in range(0, ROWS, BATCH):
        batch = images[at : at + BATCH]
        half = (len(batch) + 1) // 2
        optimizer.zero_grad()
        for part in (batch[:half], batch[half:]):
            listed = {name: [element[name] for element in part] for name in part[0]}
            # Gradients are weighted, not the loss: torchvision computes a part of it in float32.
            gradients = torch.autograd.grad(detection_loss(plain, listed), list(plain.parameters()))
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                weighted = gradient * (len(part) / len(batch))
                parameter.grad = weighted if parameter.grad is None else parameter.grad + weighted
        optimizer.step()
    assert_trained(start, plain)

    data = rd.Dataset.range(ROWS).map(lambda k: image(int(k))).ragged_batch(BATCH)
    model = train_on_replicas(two, mask_rcnn, data, detection_loss)
    assert_same(model.state_dict(), plain.state_dict())


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
