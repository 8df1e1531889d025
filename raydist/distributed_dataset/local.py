"""The distributed dataset for a single replica in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from raydist.actors.workers.executors import open_executor
from raydist.core.nest import map_structure
from raydist.distributed_dataset.base import DistributedDataset
from raydist.options import InputOptions
from raydist.pipelines.elements.convert import torch_rows
from raydist.pipelines.elements.object_leaves import map_parts
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.plan import begin_epoch
from raydist.pipelines.run.split import common_rows, dealt_rows
from raydist.pipelines.run.steps import element_views

if TYPE_CHECKING:
    import torch

    from raydist.dataset import Dataset
    from raydist.pipelines.elements.blocks import Block
    from raydist.pipelines.elements.items import IteratorState


@final
class LocalDistributedDataset(DistributedDataset):
    """Whole batches as plain tensors, for a single replica in this process. Needs no Ray.

    Args:
        dataset: The dataset.
        device: Device of the tensors; None for the CPU.
        options: Options of the distribution; the single replica gets whole batches in any case.
        on_batch: Called with each batch and its number of rows, before the batch is returned.
        dealt: Elements of any shape for one replica; False for batches, whose leaves all have rows.

    >>> from raydist.dataset import Dataset
    >>> [batch.tolist() for batch in LocalDistributedDataset(Dataset.range(5).batch(3))]
    [[0, 1, 2], [3, 4]]
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        device: torch.device | None = None,
        options: InputOptions | None = None,
        on_batch: Callable[[Any, int], None] | None = None,
        dealt: bool = False,
    ) -> None:
        super().__init__([dataset], options or InputOptions())
        self._device = device
        self._dealt = dealt
        self._on_batch = on_batch

    @property
    def element_spec(self) -> Any:
        return self._datasets[0].element_spec

    def _open_epoch(self, epoch: int, position: IteratorState | None = None) -> DatasetIterator[Any]:
        dataset = self._datasets[0]
        options = dataset.options()
        return DatasetIterator(
            begin_epoch(dataset._op, epoch, position),
            options=options,
            seed=self._epochs.seed,
            epoch=epoch,
            convert=self._convert,
            make_executor=open_executor,
        )

    def _convert(self, block: Block) -> list[Any]:
        from torch import from_numpy  # the layers above decide when torch is imported

        count_rows = dealt_rows if self._dealt else common_rows
        counts = [count_rows(leaves, structure.paths()) for leaves, structure in element_views(block)]
        rows: list[Any] = torch_rows(block, from_numpy)
        if self._device is not None and self._device.type != "cpu" and not self._options.on_host:
            rows = [map_structure(self._move, row) for row in rows]
        if self._on_batch is not None:
            for row, num_rows in zip(rows, counts, strict=True):
                self._on_batch(row, num_rows)
        return rows

    def _move(self, value: Any) -> Any:
        if isinstance(value, list | tuple | dict):  # a list of tensors, or the result of a collate function
            return map_parts(self._move, value)
        if self._device is None or not hasattr(value, "to"):
            return value
        if self._device.type == "cuda":  # a copy from pageable memory would wait for the device's computations
            value = value.pin_memory()
        return value.to(self._device, non_blocking=True)
