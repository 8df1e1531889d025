"""Dataset.from_torch: the samples of a torch Dataset, recognised by its methods, and the batches of a DataLoader."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raydist.core.errors import FailedPreconditionError, SpecError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.elements.blocks import Block, common_specs
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import BYTES, TensorSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.producers import BorderIterator
from raydist.pipelines.sources.generator import GeneratorOp, GeneratorValues, Signature

_SAMPLES = 3  # number of samples that show the spec
_QUICK_S = 0.2


def read_sample(dataset: Any) -> SampleReader | None:
    """Return the function that reads the sample of an index; None for samples that can only be iterated over."""
    # An IterableDataset inherits a `__getitem__` that only raises.
    if _is_torchs(dataset, "IterableDataset") or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return None
    return SampleReader(dataset)


def iterable_samples_op(dataset: Any, output_signature: Any) -> DatasetOp:
    """Return the operation over a dataset that can only be iterated over.

    Raises:
        SpecError: The dataset is not iterable.
    """
    if not hasattr(dataset, "__iter__"):
        raise SpecError(
            "from_torch needs a dataset with __getitem__ and __len__ (map style) or with __iter__ (iterable style), "
            f"got {dataset!r:.100} ({type(dataset).__name__})."
        )
    signature = None if output_signature is None else Signature.parse(output_signature)
    return IterableSamplesOp(dataset, signature)


def is_torch_loader(value: Any) -> bool:
    """Return True for a torch DataLoader, without importing torch."""
    return _is_torchs(value, "DataLoader")


def _is_torchs(value: Any, name: str) -> bool:
    return any(kind.__name__ == name and "torch" in kind.__module__ for kind in type(value).__mro__)


@dataclass(frozen=True, eq=False)
class SampleReader:
    """A function that reads the sample of an index of a map-style dataset."""

    dataset: Any

    def __call__(self, index: Any) -> Any:
        return self.dataset[int(index)]


@dataclass(frozen=True, eq=False)
class _Samples:
    dataset: Any

    def __call__(self) -> Iterator[Any]:
        return iter(self.dataset)


@dataclass(frozen=True, eq=False)
class IterableSamplesOp(SourceOp):
    """The samples of an iterable-style dataset, which is iterated again for every pass."""

    dataset: Any  # the dataset
    declared: Signature | None = None  # signature of a sample; None to infer it from the first samples
    name = "from_torch"

    @property
    def label(self) -> str:
        return f"from_torch({type(self.dataset).__name__})"

    @property
    def has_declared_shapes(self) -> bool:
        return self.declared is not None

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return (self.declared or self._learned).nest()

    @cached_property
    def _learned(self) -> Signature:
        """The signature of the first samples: at most three, and only within 0.2 s."""
        deadline = time.monotonic() + _QUICK_S
        first: Block | None = None
        specs: tuple[TensorSpec, ...] = ()
        try:
            for sample in itertools.islice(self.dataset, _SAMPLES):
                block = block_of_rows([sample])
                specs = block.specs if first is None else common_specs(first, specs, block)
                first = first or block
                if time.monotonic() > deadline:
                    break
        except Exception:
            if first is None:
                raise
        if first is None:
            raise FailedPreconditionError(
                f"The element_spec of {self.label} is that of its first samples, and there is none. Declare it with "
                "output_signature=."
            )
        return Signature(first.structure, specs)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        # Later samples may have other shapes than the first ones, unless shapes are declared.
        signature = self.declared or self._learned.of_any_shape()
        return GeneratorOp(_Samples(self.dataset), signature).make_iterator(ctx)


class LoaderOrder(ABC):
    """The order of the batches of a DataLoader, each described by bytes."""

    @abstractmethod
    def begin(self, epoch: int, saved: IteratorState | None) -> LoaderOrder:
        """Return the order of the epoch that begins now. Advances the loader's generators like one iteration.

        Args:
            epoch: Number of the epoch, from 0.
            saved: State of the generators at the start of the epoch, if another iterator began it; {} if unknown.
        """

    @abstractmethod
    def open(self, epoch: tuple[int, ...], state: IteratorState | None) -> tuple[IteratorState, Callable[..., Any]]:
        """Start one pass.

        Args:
            epoch: See `IterContext`.
            state: State of the generators when the pass began; None for the state of that epoch.

        Returns:
            That state, and a function that returns the same batches with every call.
        """


@dataclass(frozen=True, eq=False)
class LoaderOp(SourceOp):
    """The batches of a DataLoader, as bytes from which the next operation makes batches."""

    order: LoaderOrder  # the order of the batches
    count: int  # number of batches, or UNKNOWN_CARDINALITY
    loader: str  # name of the loader
    name = "from_torch"

    @property
    def label(self) -> str:
        return f"from_torch({self.loader})"

    def cardinality(self) -> int:
        return self.count

    def element_spec(self) -> Any:
        return TensorSpec((), BYTES)

    def at_epoch(self, epoch: int, saved: IteratorState | None) -> DatasetOp:
        return replace(self, order=self.order.begin(epoch, None if saved is None else saved.get("begin", {})))

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _LoaderIterator(self, ctx.operation_names[id(self)], ctx.epoch)


class _LoaderIterator(OpIterator):
    """An iterator over one pass. Its state: the generators' state at the start, and the number of batches."""

    def __init__(self, op: LoaderOp, name: str, epoch: tuple[int, ...]) -> None:
        self._op = op
        self._name = name
        self._epoch = epoch
        self._begin: IteratorState | None = None
        self._batches: OpIterator | None = None

    def _opened(self) -> OpIterator:
        if self._batches is None:
            self._begin, make = self._op.order.open(self._epoch, self._begin)
            values = GeneratorValues(GeneratorOp(make, Signature.parse(self._op.element_spec())))
            self._batches = BorderIterator(values)
        return self._batches

    def next_block(self, limit: int) -> Block:
        return self._opened().next_block(limit)

    def state_dict(self) -> IteratorState:
        batches = self._opened()
        return {"of": self._name, "begin": self._begin, "batches": batches.state_dict()}

    def load_state_dict(self, state: IteratorState) -> None:
        self._begin, self._batches = state["begin"], None  # saving a state before may have opened it
        self._opened().load_state_dict(state["batches"])

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
