"""What travels between the two halves of mirroring: a shipment before a step, and state in both directions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import numpy as np
import torch

from raydist.collectives.flat_bytes import flat_bytes
from raydist.collectives.reducer.parameter_hooks import ParameterHooks, detach_hooks
from raydist.compat.torch_internals import plain_tensors
from raydist.pickling.attribute_table import AttributePath
from raydist.values import PerReplica

__all__ = ["HookChanges", "Shipment", "ShipmentContents", "TensorImage", "Writes", "overwrite"]


@final
@dataclass(frozen=True, slots=True)
class ShipmentContents:
    """What the driver knows of a shipment.

    Attributes:
        values: It gives mirrored objects values: tensors, what optimizers remember, or objects that are new.
        settings: The settings of objects that it changes (a learning rate, a training flag), if it does nothing more
            for later steps: a later shipment of the same ones replaces it.
    """

    values: bool = False
    settings: frozenset[tuple[int, AttributePath]] = frozenset()


@final
@dataclass(slots=True)  # not frozen, though nobody changes one: that takes twice as long to be read, in every step
class Shipment:
    """All that one step needs and the replicas do not have yet; the same for every replica.

    Attributes:
        released: Handles whose objects the driver's program has dropped.
        bundle: Pickle of the objects that are new to the replicas, empty for none.
        writes: Pickle of what the driver changed since the last step, empty for nothing.
        function: Pickle of the step function, empty when the replicas have it under `digest`.
        digest: Digest of the function's pickle; empty for a function that is not to be kept.
        forget: Digests of functions that will not be named again.
        arguments: Pickle of `(args, kwargs)`, with placeholders for `PerReplica` leaves.
        per_replica: The leaves behind the placeholders, by number. They stay with the driver.
        contents: What is in it. That stays with the driver, too.
    """

    released: tuple[int, ...] = ()
    bundle: bytes = b""
    writes: bytes = b""
    function: bytes = b""
    digest: bytes = b""
    forget: tuple[bytes, ...] = ()
    arguments: bytes = b""
    per_replica: tuple[PerReplica, ...] = ()
    contents: ShipmentContents = ShipmentContents()

    @property
    def num_bytes(self) -> int:
        """Size of what is sent to each replica."""
        return len(self.bundle) + len(self.writes) + len(self.function) + len(self.arguments)

    @property
    def travelling(self) -> tuple[Any, ...]:
        """What a replica receives of it."""
        return self.released, self.bundle, self.writes, self.function, self.digest, self.forget, self.arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return Shipment, self.travelling

    def knowing(self, writes: Writes) -> Shipment:
        """This one, with its contents: `writes` is what its own are the pickle of."""
        values = bool(self.bundle or writes.tensors or writes.optimizer_states)
        kept = self.without_step()
        others = kept is None or kept.released or kept.bundle or kept.function or kept.forget
        if others or not writes.only_settings:
            return replace(self, contents=ShipmentContents(values))
        settings = frozenset((handle, path) for handle in writes.control for path in writes.control[handle])
        return replace(self, contents=ShipmentContents(values, settings))

    def without_parts(self) -> Shipment:
        """What a replica receives."""
        return replace(self, per_replica=(), contents=ShipmentContents())

    def without_step(self) -> Shipment | None:
        """What it brings for later steps as well; None for nothing."""
        function = self.function if self.digest else b""
        if not (self.released or self.bundle or self.writes or function or self.forget):
            return None  # nearly always: to make a copy first took 3 us a step
        return replace(self.without_parts(), arguments=b"", function=function)

    def of_step(self) -> Shipment:
        """What it brings for this step only."""
        return Shipment(function=b"" if self.digest else self.function, digest=self.digest, arguments=self.arguments)


@final
@dataclass(frozen=True, slots=True)
class TensorImage:
    """The values of a tensor as bytes: numpy carries them through an object store without a copy, bfloat16 too.

    Attributes:
        array: The bytes; none for a sparse tensor.
        dtype: The tensor's.
        shape: The tensor's.
        layout: The tensor's.
        parts: Images of indices and values, for a sparse tensor.
    """

    array: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: torch.Size
    layout: torch.layout = torch.strided
    parts: tuple[TensorImage, ...] = ()

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorImage:
        """An image of the present values (it shares their memory where they are contiguous on the CPU)."""
        with plain_tensors():
            held = tensor.detach().to("cpu")
            if held.layout is not torch.strided:
                parts = tuple(TensorImage.of(part) for part in _parts(held))
                return TensorImage(np.empty(0, np.uint8), tensor.dtype, tensor.shape, tensor.layout, parts)
            return TensorImage(flat_bytes(held).numpy(), tensor.dtype, tensor.shape)

    def tensor(self) -> torch.Tensor:
        """The values in memory of their own."""
        if self.layout is not torch.strided:
            return _joined(self.layout, [part.tensor() for part in self.parts], self.shape)
        if not self.array.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.array.copy()).view(self.dtype).reshape(self.shape)

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether these are the present values of `tensor`, bit by bit."""
        return self._equals(TensorImage.of(tensor))

    def _equals(self, other: TensorImage) -> bool:
        mine, theirs = ((each.dtype, each.shape, each.layout, len(each.parts)) for each in (self, other))
        parts = zip(self.parts, other.parts, strict=False)
        return mine == theirs and np.array_equal(self.array, other.array) and all(a._equals(b) for a, b in parts)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


def _joined(layout: torch.layout, parts: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
    rows, columns, values = parts
    return torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=False)


@final
@dataclass(frozen=True, slots=True)
class HookChanges:
    """What the driver did to the hooks on one parameter.

    Attributes:
        removed: Keys of those that are gone.
        added: New ones.
    """

    removed: tuple[Hashable, ...]
    added: ParameterHooks

    def apply(self, parameter: torch.Tensor) -> None:
        """Do the same to a replica's parameter."""
        detach_hooks(parameter, self.removed)
        self.added.attach(parameter)


@final
@dataclass(slots=True)
class Writes:
    """What the driver changed between two steps, by handle.

    A metric's states come twice: for the first replica, and for all others.
    """

    control: dict[int, dict[AttributePath, Any]] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    requires_grad: dict[int, bool] = field(default_factory=dict)
    optimizer_states: dict[int, Any] = field(default_factory=dict)
    metrics: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)

    cleared_gradients: list[int] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    hooks: dict[int, HookChanges] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, column.name) for column in fields(self))

    @property
    def only_settings(self) -> bool:
        """Whether it changes attributes of objects, if anything."""
        return not any(getattr(self, column.name) for column in fields(self) if column.name != "control")


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give `tensor` these values in place; new memory only where shape, dtype or layout differ, it is sparse, or
    expanded: then several elements have one place in memory.
    """
    with torch.no_grad(), plain_tensors():
        alike = tensor.shape == values.shape and tensor.dtype == values.dtype and tensor.layout is values.layout
        # An assignment to the `.data` of a CSR tensor does nothing.
        if alike and tensor.layout is not torch.sparse_coo and not _is_expanded(tensor):
            tensor.copy_(values)
        else:
            tensor.data = values.to(tensor.device)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether torch refuses to write to it, as several of its elements are one."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
