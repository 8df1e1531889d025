"""torch.utils.data.DataLoader. Datasets give a whole batch at once (`__getitems__`) where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmarks.pipelines.peers.pictures import augmented
from benchmarks.pipelines.scene import MakePass, Pass, Scene


def first_leaf(batch: Any) -> torch.Tensor:
    leaf: torch.Tensor = batch[0] if isinstance(batch, tuple | list) else batch
    return leaf


def reading(loader: DataLoader[Any]) -> Pass:
    return lambda: sum(len(first_leaf(batch)) for batch in loader)


def loading(dataset: Dataset[Any], scene: Scene, **settings: Any) -> Pass:
    """A pass of a loader whose workers, if any, live on between passes."""
    workers = scene.num_workers
    return reading(DataLoader(dataset, num_workers=workers, persistent_workers=workers > 0, **settings))


class Rows(Dataset[Any]):
    """`make_batch` of the numbers of a batch's rows."""

    def __init__(self, count: int, make_batch: Callable[[Sequence[int]], Any]) -> None:
        self.count = count
        self.make_batch = make_batch

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.make_batch(indices)

    def __getitem__(self, index: int) -> Any:
        return self.make_batch([index])


class Stream(IterableDataset[Any]):
    """The elements of `make_elements(start, stop)`; each worker has a part of its own."""

    def __init__(self, count: int, make_elements: Callable[[int, int], Iterator[Any]]) -> None:
        self.count = count
        self.make_elements = make_elements

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self.make_elements(self.count * index // workers, self.count * (index + 1) // workers)


def as_it_is(batch: Any) -> Any:
    return batch


def doubled(x: int) -> int:
    return x * 2 + 1


def doubled_rows(indices: Sequence[int]) -> torch.Tensor:
    return torch.tensor([doubled(index) for index in indices])


def element_map(scene: Scene) -> Pass:
    return loading(Rows(scene.rows, doubled_rows), scene, batch_size=1024, collate_fn=as_it_is)


def doubled_block(count: int, blocks: Sequence[int]) -> torch.Tensor:
    (block,) = blocks
    return torch.arange(block * 1024, min((block + 1) * 1024, count)) * 2 + 1


def batch_map(scene: Scene) -> Pass:
    blocks = Rows(-(-scene.rows // 1024), partial(doubled_block, scene.rows))
    return loading(blocks, scene, batch_size=None)


def shuffle(scene: Scene) -> Pass:
    return loading(Rows(scene.rows, torch.tensor), scene, batch_size=1024, shuffle=True, collate_fn=as_it_is)


def multiples_of_three(start: int, stop: int) -> Iterator[int]:
    return (x for x in range(start, stop) if x % 3 == 0)


def filter_numbers(scene: Scene) -> Pass:
    return loading(Stream(scene.rows, multiples_of_three), scene, batch_size=500, collate_fn=torch.tensor)


def window_rows(starts: Sequence[int]) -> torch.Tensor:
    return torch.stack([torch.arange(start, start + 5) for start in starts])


def window(scene: Scene) -> Pass:
    return loading(Rows(scene.rows - 4, window_rows), scene, batch_size=64, collate_fn=as_it_is)


def mnist(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    images = np.load(scene.folder / "mnist" / "images.npy")[: scene.rows]
    labels = np.load(scene.folder / "mnist" / "labels.npy")[: scene.rows]
    return torch.from_numpy(images), torch.from_numpy(labels)


def scaled_one_by_one(images: torch.Tensor, labels: torch.Tensor, indices: Sequence[int]) -> Any:
    return torch.stack([images[index].float() / 255 for index in indices]), labels[indices]


def scaled_at_once(images: torch.Tensor, labels: torch.Tensor, indices: Sequence[int]) -> Any:
    return images[indices].float() / 255, labels[indices]


def mnist_element_map(scene: Scene) -> Pass:
    rows = Rows(scene.rows, partial(scaled_one_by_one, *mnist(scene)))
    return loading(rows, scene, batch_size=128, shuffle=True, collate_fn=as_it_is)


def mnist_batch_map(scene: Scene) -> Pass:
    rows = Rows(scene.rows, partial(scaled_at_once, *mnist(scene)))
    return loading(rows, scene, batch_size=128, shuffle=True, collate_fn=as_it_is)


class Pictures(Dataset[torch.Tensor]):
    """JPEG files, augmented."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.draw = np.random.default_rng()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(augmented(self.paths[index].read_bytes(), self.draw))


def jpeg(scene: Scene) -> Pass:
    paths = sorted((scene.folder / "jpegs").glob("*.jpg"))[: scene.rows]
    return loading(Pictures(paths), scene, batch_size=32, shuffle=True)


PASSES: Mapping[str, MakePass] = {
    "element_map": element_map,
    "batch_map": batch_map,
    "shuffle": shuffle,
    "filter": filter_numbers,
    "window": window,
    "mnist_element_map": mnist_element_map,
    "mnist_batch_map": mnist_batch_map,
    "mnist_input_workers": mnist_element_map,
    "jpeg": jpeg,
    "jpeg_input_workers": jpeg,
}
