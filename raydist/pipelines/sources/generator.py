"""Dataset.from_generator: the values of a Python generator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from raydist.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.foreign_errors import LEAVING, annotate, as_exception
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.element_nests import map_element
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.resume import Outbox
from raydist.pipelines.sources.signature import Signature
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["GeneratorOp"]

_FILL_S = 0.02  # seconds after which a block is handed on, so that a slow generator does not hold back values
_BLOCK_BYTES = 1 << 22


@final
@dataclass(frozen=True, eq=False)
class GeneratorOp(SourceOp):
    """The values of `generator(*args)`, which is called for every pass."""

    generator: Callable[..., Any]
    signature: Signature
    args: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls, generator: Any, output_signature: Any, args: Any, output_types: Any = None, output_shapes: Any = None
    ) -> GeneratorOp:
        """Return the operation for the arguments of `from_generator`."""
        if not callable(generator):
            raise SpecError(
                f"from_generator needs a function that gives a fresh iterator for every pass, got {generator!r:.100}. "
                "Give the generator function itself, without calling it."
            )
        signature = _signature(output_signature, output_types, output_shapes)
        return cls(generator, signature, map_element(as_leaf, tuple(args or ())))

    @property
    def name(self) -> str:
        return "from_generator"

    @property
    def label(self) -> str:
        return f"from_generator({function_label(self.generator)})"

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return self.signature.nest()

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return GeneratorIterator(self)


def _signature(output_signature: Any, output_types: Any, output_shapes: Any) -> Signature:
    if output_signature is not None:
        if output_types is not None or output_shapes is not None:
            raise InvalidArgumentError(
                "from_generator takes output_signature, or output_types with output_shapes, got both: "
                f"{output_signature!r:.100}, {output_types!r:.100} and {output_shapes!r:.100}. Leave out one of them."
            )
        return Signature.parse(output_signature)
    if output_types is not None:
        return Signature.of_types(output_types, output_shapes)
    raise SpecError(
        "from_generator needs output_signature=, a nest of rd.TensorSpec that describes one element, "
        "e.g. (rd.TensorSpec((28, 28), 'uint8'), rd.TensorSpec((), 'int64')), got None."
    )


@final
class GeneratorIterator(OpIterator):
    """An iterator over one call of the generator. Its state is a count: resuming calls again and skips values."""

    def __init__(self, op: GeneratorOp) -> None:
        self._op = op
        self._values: Iterator[Any] | None = None
        self._num_taken = 0
        self._over = False
        self._outbox = Outbox(self._position())

    def next_block(self, limit: int) -> Block:
        while not self._outbox:
            if self._over:
                raise StopIteration
            self._outbox.put(self._take(limit), self._position())
        return self._outbox.take(limit)

    def _take(self, limit: int) -> list[Item]:
        """Return up to `limit` elements, and the error after them if there is one."""
        rows: list[list[Any]] = []
        deadline = time.monotonic() + _FILL_S
        while len(rows) < limit and (not rows or time.monotonic() < deadline):
            try:
                value = next(self._open())
            except StopIteration:
                self._over = True
                break
            except LEAVING:
                raise
            except BaseException as error:  # the generator's own error: a generator ends with an error
                self._over = True
                return [*self._blocks(rows), self._noted(error)]
            self._num_taken += 1
            try:
                rows.append(self._op.signature.leaves(value))
            except SpecError as error:
                return [*self._blocks(rows), self._noted(error)]
            if len(rows) == 1:
                limit = min(limit, max(1, _BLOCK_BYTES // max(1, sum(map(_num_bytes, rows[0])))))
        return self._blocks(rows)

    def _blocks(self, rows: list[list[Any]]) -> list[Item]:
        return [self._op.signature.block(rows)] if rows else []

    def _noted(self, error: BaseException) -> ElementError:
        index = self._num_taken if self._over else self._num_taken - 1
        annotate(error, f"In {self._op.label}, element {index}.")
        return ElementError(as_exception(error))

    def _open(self) -> Iterator[Any]:
        """Return the running generator, after the values that were handed out before."""
        if self._values is None:
            made = self._op.generator(*self._op.args)
            try:
                self._values = iter(made)
            except TypeError:
                raise SpecError(f"{self._op.label} must return an iterator, got {made!r:.100}.") from None
            self._pass_over(self._values, self._num_taken)
        return self._values

    def _pass_over(self, values: Iterator[Any], count: int) -> None:
        for passed in range(count):
            try:
                next(values)
            except StopIteration:
                raise FailedPreconditionError(
                    f"{self._op.label} must yield the same values again to resume after {count} of them, but it ended "
                    f"after {passed}."
                ) from None

    def _position(self) -> IteratorState:
        return {"taken": self._num_taken, "over": self._over}

    def state_dict(self) -> IteratorState:
        return self._outbox.state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        position = self._outbox.load_state_dict(state)
        self._num_taken = int(position["taken"])
        self._over = bool(position["over"])

    def close(self) -> None:
        self._over = True
        stop = getattr(self._values, "close", None)
        self._values = None
        if stop is not None:
            stop()


def _num_bytes(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, bytes | str) else int(leaf.nbytes)
