"""The messages between driver and replicas: a payload before each step, and calls of the driver between steps.

The driver names a call by the method: `link.call(0, MirrorCalls.tensor_images, handles)`, so that a type checker sees
arguments and results on both sides. The method itself is sent; the replica looks its name up on its own object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar, TypeVarTuple, final

import numpy as np
import torch

from raydist.collectives.reducer.parameter_hooks import ParameterHooks
from raydist.collectives.tensors import flat_bytes
from raydist.compat.torch_internals import plain_tensors
from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.pickling.attribute_table import AttributePath
from raydist.utils.sharded_tensors import is_sharded, share_of, whole

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
@dataclass(slots=True)  # immutable, but not frozen: unpickling a frozen one takes twice as long, in every step
class StepPayload:
    """Everything that one step needs and the replicas do not have yet; the same for every replica.

    Attributes:
        released: Handles whose objects the driver's program has dropped.
        bundle: Pickle of the objects that are new to the replicas; empty if there are none.
        writes: Pickle of the driver's changes since the last step (`Writes`); empty if there are none.
        function: Pickle of the step function; empty if the replicas have the function under `digest`.
        digest: Digest of the function's pickle; empty for a function that replicas do not keep.
        forget: Digests of functions that replicas drop.
        arguments: Pickle of `(args, kwargs)`, with placeholders for `PerReplica` leaves.
        per_replica: The `PerReplica` leaves by placeholder number; not sent.
        has_values: True if there are tensors, optimizer states or new objects in it; not sent.
        settings: The attributes that the payload changes (a learning rate, a training flag), if later steps need
            nothing else from it: a later payload of the same attributes replaces this one. Not sent.
    """

    released: tuple[int, ...] = ()
    bundle: bytes = b""
    writes: bytes = b""
    function: bytes = b""
    digest: bytes = b""
    forget: tuple[bytes, ...] = ()
    arguments: bytes = b""
    per_replica: tuple[PerReplica, ...] = ()
    has_values: bool = False
    settings: frozenset[tuple[int, AttributePath]] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        sent = self.released, self.bundle, self.writes, self.function, self.digest, self.forget, self.arguments
        return StepPayload, sent

    def summarize(self, writes: Writes) -> None:
        """Set `has_values` and `settings` by the unpickled `writes`."""
        self.has_values = bool(self.bundle or writes.tensors or writes.optimizer_states)
        others = self.released or self.bundle or self.forget or (self.function and self.digest)
        if writes.control and writes.only_settings and not others:
            self.settings = frozenset((handle, path) for handle in writes.control for path in writes.control[handle])

    def without_parts(self) -> StepPayload:
        """Return the payload without the fields that stay on the driver."""
        return replace(self, per_replica=(), has_values=False, settings=frozenset())

    def without_step(self) -> StepPayload | None:
        """Return the part of the payload that later steps need as well; None if there is none."""
        function = self.function if self.digest else b""
        if not (self.released or self.bundle or self.writes or function or self.forget):
            return None  # nearly always; a copy before this check took 3 us a step
        return replace(self.without_parts(), arguments=b"", function=function)

    def of_step(self) -> StepPayload:
        """Return the part of the payload that only this step needs."""
        return StepPayload(function=b"" if self.digest else self.function, digest=self.digest, arguments=self.arguments)


@final
@dataclass(frozen=True, slots=True)
class TensorImage:
    """The values of a tensor as a numpy array of bytes, which the object store passes without a copy (bfloat16 too).

    Attributes:
        array: The bytes; empty for a sparse tensor.
        dtype: dtype of the tensor.
        shape: Shape of the tensor.
        layout: Layout of the tensor.
        parts: Images of the indices and values of a sparse tensor.
    """

    array: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: torch.Size
    layout: torch.layout = torch.strided
    parts: tuple[TensorImage, ...] = ()

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorImage:
        """Return an image of the present values; it shares the memory of a contiguous CPU tensor.

        A collective of all replicas for a sharded tensor.
        """
        with plain_tensors():
            tensor = whole(tensor)
            held = tensor.detach().to("cpu")
            if held.layout is not torch.strided:
                parts = tuple(TensorImage.of(part) for part in _parts(held))
                return TensorImage(np.empty(0, np.uint8), tensor.dtype, tensor.shape, tensor.layout, parts)
            return TensorImage(flat_bytes(held).numpy(), tensor.dtype, tensor.shape)

    def tensor(self) -> torch.Tensor:
        """Return the values as a tensor with its own memory."""
        if self.layout is not torch.strided:
            return _joined(self.layout, [part.tensor() for part in self.parts], self.shape)
        if not self.array.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.array.copy()).view(self.dtype).reshape(self.shape)

    def shows(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` has bitwise the same values, dtype, shape and layout."""
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
@dataclass(slots=True)
class Writes:
    """The driver's changes between two steps, by handle.

    A metric has two sets of states: one for the first replica, and one for each other replica. Changes to the hooks on
    a parameter are the keys of removed hooks, and the new hooks.
    """

    control: dict[int, dict[AttributePath, Any]] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    requires_grad: dict[int, bool] = field(default_factory=dict)
    optimizer_states: dict[int, Any] = field(default_factory=dict)
    metrics: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)

    cleared_gradients: list[int] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    hooks: dict[int, tuple[tuple[Hashable, ...], ParameterHooks]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, column.name) for column in fields(self))

    @property
    def only_settings(self) -> bool:
        """Return True if there are no changes except to attributes of objects."""
        return not any(getattr(self, column.name) for column in fields(self) if column.name != "control")


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give `tensor` these values in place.

    The tensor gets new memory only if shape, dtype or layout differ, or it is sparse or expanded.
    """
    with torch.no_grad(), plain_tensors():
        if is_sharded(tensor):
            tensor.copy_(share_of(values, tensor))
            return
        alike = tensor.shape == values.shape and tensor.dtype == values.dtype and tensor.layout is values.layout
        # An assignment to the `.data` of a CSR tensor has no effect.
        if alike and tensor.layout is not torch.sparse_coo and not _is_expanded(tensor):
            tensor.copy_(values)
        else:
            tensor.data = values.to(tensor.device)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return True if several elements share one memory location: torch refuses to write to such a tensor."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class MirrorCalls(ABC):
    """The methods of a replica that the driver may call between steps."""

    @abstractmethod
    def collect_control(self, modules: bool) -> bytes:
        """Return the pickled control state that changed since the last call.

        That is either the state of modules, which takes longer to compare, with `requires_grad`, or of other objects.
        """

    @abstractmethod
    def tensor_images(self, handles: Sequence[int]) -> dict[int, TensorImage]:
        """Return the present values of these parameters and buffers, as far as this replica has them."""

    @abstractmethod
    def collect_gradients(self) -> dict[int, TensorImage]:
        """Return the gradients of all parameters that have one."""

    @abstractmethod
    def collect_optimizer_state(self, handle: int) -> bytes:
        """Return the pickled `state` of an optimizer (momentum and similar)."""

    @abstractmethod
    def collect_metrics(self) -> bytes:
        """Return the pickled states of all metrics by handle."""

    @abstractmethod
    def pull_rows(self, handle: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the present values of these rows of an embedding table."""

    @abstractmethod
    def export_rows(self, handle: int) -> list[dict[str, Any]]:
        """Return all rows of an embedding table; see `RowAccess`."""

    @abstractmethod
    def import_rows(self, handle: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows of an embedding table; see `RowAccess`."""

    @abstractmethod
    def dump(self) -> tuple[bytes, frozenset[int]]:
        """Return the pickled state of this replica, to be given to `load` of others, and the handles in it."""

    @abstractmethod
    def handles(self) -> frozenset[int]:
        """Return the handles of all objects."""

    @abstractmethod
    def load(self, state: bytes) -> None:
        """Load the state that another replica returned from `dump`, except the state that each replica gathers itself.

        Running statistics and metric states of this replica stay. A metric that is new to this replica gets states that
        merge with the states of the other replica to exactly the latter.
        """


class ReplicaLink(Protocol):
    """The interface by which the driver calls the replicas, ranks 0, 1, ..."""

    def call(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """Call a method of one replica after all dispatched steps; raise the error of a step that failed. Blocks."""

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """Call a method of every replica after all dispatched steps; return the results in rank order. Blocks."""


def answer(replica: MirrorCalls, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
    """Call the method of `replica` that overrides this method of :class:`MirrorCalls`: the receiving end of a link."""
    if getattr(MirrorCalls, method.__name__, None) is not method:
        raise FailedPreconditionError(
            f"raydist bug: a replica answers the methods of MirrorCalls only, got {method!r}."
        )
    found: Any = getattr(replica, method.__name__)
    result: _T = found(*args)
    return result
