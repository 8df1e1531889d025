"""Reading datasets of raydist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import raydist as rd
from benchmarks.pipelines.scene import Pass, Scene


def num_rows(batch: Any) -> int:
    """Rows of a batch: of its first leaf."""
    while isinstance(batch, tuple | dict):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)


def reading(dataset: rd.Dataset, size: Callable[[Any], int] = num_rows) -> Pass:
    """A pass over all of a batched dataset, as torch tensors."""
    return lambda: sum(size(batch) for batch in dataset)


def placed(dataset: rd.Dataset, scene: Scene) -> rd.Dataset:
    """The dataset on the scene's input workers; settings made by hand are not tuned."""
    options = rd.Options()
    options.num_input_workers = scene.num_workers
    if scene.num_calls is not None:
        options.autotune.enabled = False
    return dataset.with_options(options)
