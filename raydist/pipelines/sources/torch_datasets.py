"""Dataset.from_torch: the samples of a torch.utils.data.Dataset, recognised by what it can do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from raydist.errors import FailedPreconditionError, SpecError
from raydist.pipelines.elements.blocks import Block, common_specs
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.sources.generator import GeneratorIterator, GeneratorOp
from raydist.pipelines.sources.signature import Signature
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["IterableSamplesOp", "is_sample_reader", "iterable_samples_op", "read_sample"]

_SAMPLES = 3  # looked at to learn what samples are
_QUICK_S = 0.2


def read_sample(dataset: Any) -> Callable[[Any], Any] | None:
    """The function that reads the sample of an index; None where samples can only be iterated over."""
    if _is_iterable_style(dataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return None
    return _Sample(dataset)


def is_sample_reader(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is what `read_sample` gives."""
    return isinstance(fn, _Sample)


def iterable_samples_op(dataset: Any, output_signature: Any) -> DatasetOp:
    """The samples of a dataset that can only be iterated over.

    Raises:
        SpecError: It cannot.
    """
    if not hasattr(dataset, "__iter__"):
        raise SpecError(
            "from_torch needs a dataset with __getitem__ and __len__ (map style) or with __iter__ (iterable style), "
            f"got {dataset!r:.100} ({type(dataset).__name__})."
        )
    signature = None if output_signature is None else Signature.parse(output_signature)
    return IterableSamplesOp(dataset, signature)


def _is_iterable_style(dataset: Any) -> bool:
    """Torch's IterableDataset inherits a `__getitem__` that only raises: its name tells more."""
    return any(kind.__name__ == "IterableDataset" and "torch" in kind.__module__ for kind in type(dataset).__mro__)


@final
@dataclass(frozen=True, eq=False)
class _Sample:
    dataset: Any

    def __call__(self, index: Any) -> Any:
        return self.dataset[int(index)]


@final
@dataclass(frozen=True, eq=False)
class _Samples:
    dataset: Any

    def __call__(self) -> Iterator[Any]:
        return iter(self.dataset)


@final
@dataclass(frozen=True, eq=False)
class IterableSamplesOp(SourceOp):
    """The samples of an iterable-style dataset, iterated afresh for every pass.

    Attributes:
        dataset: The dataset.
        declared: What a sample is; None to learn it from the first ones.
    """

    dataset: Any
    declared: Signature | None = None

    @property
    def name(self) -> str:
        return "from_torch"

    @property
    def label(self) -> str:
        return f"from_torch({type(self.dataset).__name__})"

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return (self.declared or self._learned).nest()

    @cached_property
    def _learned(self) -> Signature:
        """What the first samples are: at most three, and only while they are quick to get."""
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
        # Later samples may have other shapes than the first ones, unless it was declared that they have not.
        signature = self.declared or self._learned.of_any_shape()
        return GeneratorIterator(GeneratorOp(_Samples(self.dataset), signature))
