"""Mirrored variables on the driver: parameters and buffers that show the replicas' current values.

A tensor becomes mirrored in place: its class changes to `MirroredTensor`, so that optimizers, closures and lists keep
the same object. Before a torch function uses the tensor, `__torch_function__` lets the `TensorOwner` fetch the current
values. Before the next step, the owner compares each used tensor with what the replicas have, to find writes. Most
writes increase torch's version counter. Writes through other objects with the same memory (a numpy array, `.data`) do
not; while such an *alias* lives, the record keeps a copy of the values to compare.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, final

import numpy as np
import torch
from torch.multiprocessing.reductions import shared_cache, storage_from_cache

from raydist.compat.torch_internals import (
    VALUELESS_GETTERS,
    StorageWeakRef,
    disable_compiler,
    mark_as_parameter,
    num_writes,
    plain_tensors,
    unmark_as_parameter,
)
from raydist.core.errors import FailedPreconditionError
from raydist.utils.torch_modes import outside_inference_mode


@final
class MemoryAliases:
    """The objects besides one tensor that may write to the tensor's memory.

    Aliases from before this object was created are looked for once, when `exist` is first called.
    """

    __slots__ = ("_has_untracked", "_tracked")

    def __init__(self) -> None:
        self._tracked: list[Callable[[], Any]] = []
        self._has_untracked: bool | None = None  # None: nobody has looked yet

    def add(self, alias: Callable[[], Any]) -> None:
        """Add an alias, given by a weak reference."""
        self._tracked.append(alias)

    def alias_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return another storage object of the same memory, which counts as an alias while it lives."""
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        alias = torch.from_numpy(memory).untyped_storage()
        reference = StorageWeakRef(alias)
        self.add(lambda: None if reference.expired() else reference)
        return alias

    def add_untracked(self) -> None:
        """Record an alias without weak references; it counts as living for good."""
        self._has_untracked = True

    def exist(self, tensor: torch.Tensor) -> bool:
        """Return True while an object besides the tensor may write to the tensor's memory."""
        if self._has_untracked is None:
            with plain_tensors():
                self._has_untracked = is_used_elsewhere(tensor)
        return self.may_exist()

    def may_exist(self) -> bool:
        """Return the same without looking for earlier aliases; True if nobody has looked for them yet."""
        self._tracked = [alias for alias in self._tracked if alias() is not None]
        return self._has_untracked is not False or bool(self._tracked)


@outside_inference_mode  # or the tensor would get memory of inference mode
def is_used_elsewhere(tensor: torch.Tensor) -> bool:
    """Return True if an object besides this tensor holds the tensor's memory.

    The function moves the tensor to new memory. If the old storage still lives then, another object holds it, and the
    function moves the tensor back. Memory that is shared between processes is not checked.

    >>> tensor = torch.zeros(2)
    >>> is_used_elsewhere(tensor)
    False
    >>> view = tensor[1:]
    >>> is_used_elsewhere(tensor), tensor.data_ptr() + 4 == view.data_ptr()
    (True, True)
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False  # a sparse tensor consists of several tensors
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes:
        return True
    copy = tensor.detach().clone()
    if not storage.nbytes() or storage.is_shared():
        return False
    if copy.stride() != tensor.stride() or tensor.is_inference():
        return True
    key = object()
    shared_cache[key] = StorageWeakRef(storage)
    del storage
    tensor.data = copy
    held: Any = storage_from_cache(torch.UntypedStorage, key)
    del shared_cache[key]
    if held is not None:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(held, 0, copy.shape, copy.stride())
    return held is not None


_RECORD = "_raydist_record"
UNKNOWN_VERSION = -2  # which `num_writes` never is


class TensorOwner(Protocol):
    """The interface that keeps the values of mirrored tensors up to date."""

    def before_values(self, record: TensorRecord) -> None:
        """Prepare for a read or write of the tensor's values."""

    def want_all(self) -> None:
        """Prepare for a read of the values of several tensors."""

    def values_of(self, record: TensorRecord) -> torch.Tensor:
        """Return the present values of a tensor that has no memory on the driver, in memory of their own. Blocks."""

    def write(self, record: TensorRecord, values: torch.Tensor) -> None:
        """Give a tensor that has no memory on the driver these values, on the replicas before their next step."""

    def before_flags(self, record: TensorRecord) -> None:
        """Prepare for a read or write of `requires_grad`."""

    def before_gradient(self, record: TensorRecord) -> None:
        """Prepare for a read of `.grad`."""

    def after_hook(self, record: TensorRecord) -> None:
        """Record that a hook was registered on the tensor."""

    def after_gradient(self, record: TensorRecord) -> None:
        """Record that `.grad` was set or deleted."""

    def after_use(self, record: TensorRecord) -> None:
        """Record that a function has returned that may have written to the memory or returned an alias."""

    def copied(self, copy: torch.Tensor) -> None:
        """Record that a deep copy was made."""


@final
class TensorRecord:
    """The driver's record of one mirrored tensor.

    Attributes:
        handle: Handle of the tensor.
        owner: Keeps the tensor's values up to date.
        plain: Class of the tensor before it was mirrored.
        is_meta: True if the driver has no memory for the values: the tensor is on the device "meta".
        version: torch's version counter when the tensor last equalled the replicas' value.
        memory: Address, dtype and shape at that time: `p.data = x` replaces the memory.
        requires_grad: The flag that the replicas have.
        synced: A copy of the values at that time; kept only while an alias may write to the memory.
        aliases: Objects that may write to the memory.
        fetched_at: Number of the last step when the owner last fetched the values.
    """

    __slots__ = (
        *("__weakref__", "_tensor", "fetched_at", "handle", "memory", "owner", "plain", "requires_grad", "synced"),
        *("aliases", "is_meta", "version"),
    )

    def __init__(self, tensor: torch.Tensor, handle: int, owner: TensorOwner) -> None:
        self._tensor = weakref.ref(tensor)
        self.handle = handle
        self.owner = owner
        self.plain = type(tensor)
        self.is_meta = tensor.is_meta
        self.synced: torch.Tensor | None = None
        self.aliases = MemoryAliases()
        self.fetched_at = 0
        self.note_sent(tensor)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The mirrored tensor; None once the program has dropped it."""
        return self._tensor()

    def note_sent(self, tensor: torch.Tensor) -> None:
        """Record that the replicas have the tensor's values and flag, or get them with the next step."""
        self.note_synced(tensor)
        with plain_tensors():
            self.requires_grad = tensor.requires_grad

    def note_synced(self, tensor: torch.Tensor) -> None:
        """Record that the tensor equals the replicas' value now (`requires_grad` may still differ)."""
        with plain_tensors():
            self.synced = tensor.detach().clone() if self.aliases.exist(tensor) else None
            self.version = num_writes(tensor)
            self.memory = _address(tensor)

    def keep_if_shared(self, tensor: torch.Tensor) -> None:
        """Keep a copy of the present values for comparison if an alias may share the memory."""
        if self.synced is None and self.aliases.may_exist():
            with plain_tensors():
                self.synced = tensor.detach().clone()

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Return True if the driver has written to the tensor since it last equalled the replicas' value."""
        with plain_tensors():
            if num_writes(tensor) != self.version or _address(tensor) != self.memory:
                return True
            return self.synced is not None and not _equal(self.synced, tensor.detach())

    def note_uncounted_write(self, tensor: torch.Tensor, before: torch.Tensor) -> None:
        """Record a write if a function has changed the values without increasing torch's version counter."""
        if not _equal(before, tensor.detach()):
            self.version = UNKNOWN_VERSION

    def merge(self, tensor: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """Return `fresh` with the elements that the driver wrote through an alias since the tensor was last synced."""
        if self.synced is None or self.synced.shape != fresh.shape or self.synced.dtype != fresh.dtype:
            return fresh
        kept = _differs(self.synced, tensor.detach())
        return torch.where(kept, tensor.detach(), fresh.to(tensor.device)) if bool(kept.any()) else fresh


def _address(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.Size]:
    return tensor_address(tensor), tensor.dtype, tensor.shape


def tensor_address(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a tensor's values; 0 for an uncoalesced tensor."""
    if tensor.layout is torch.strided:
        return tensor.data_ptr()
    if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
        return 0
    return tensor.values().data_ptr()


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    both_nan = (a != a) & (b != b)  # only NaN differs from itself
    return (a != b) & ~both_nan


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and not bool(_differs(a, b).any())


def _descriptor(name: str) -> Any:
    return getattr(torch.Tensor, name)


def _getter(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = _descriptor(name).__get__
    return found


def _setter(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = _descriptor(name).__set__
    return found


def _getters(names: Iterable[str]) -> frozenset[Callable[..., Any]]:
    return frozenset(_getter(name) for name in names if hasattr(torch.Tensor, name))


_METHODS: list[Any] = [
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.Tensor.element_size, torch.Tensor.storage_offset, torch.Tensor.is_contiguous,
    torch.Tensor.__hash__,
    torch.Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.get_device,
]  # fmt: skip
_NO_VALUES: frozenset[Callable[..., Any]] = _getters(
    ["shape", "dtype", "device", "ndim", "is_leaf", "layout", "grad_fn", "is_cuda", "is_sparse", "is_cpu"]
    + ["is_quantized", "is_meta", "is_nested", "itemsize", "nbytes", "names"]
) | frozenset((*_METHODS, *VALUELESS_GETTERS))
# For functions that do not use the values: the owner's methods to call before (none if empty) and after the function.
_OWNER_CALLS: dict[Callable[..., Any], tuple[str, str]] = {
    _getter("requires_grad"): ("before_flags", "after_use"),
    _setter("requires_grad"): ("before_flags", "after_use"),
    torch.Tensor.requires_grad_: ("before_flags", "after_use"),
    _getter("grad"): ("before_gradient", "after_use"),
    _setter("grad"): ("", "after_gradient"),
    _descriptor("grad").__delete__: ("", "after_gradient"),
    torch.Tensor.register_hook: ("before_flags", "after_hook"),
    torch.Tensor.register_post_accumulate_grad_hook: ("before_flags", "after_hook"),
}


# Functions that write running statistics without increasing torch's version counter.
_STATISTICS_WRITERS: frozenset[Any] = frozenset({
    torch.nn.functional.batch_norm, torch.nn.functional.instance_norm, torch.batch_norm, torch.instance_norm,
    torch.native_batch_norm, torch.batch_norm_update_stats,
})  # fmt: skip
_SET_DATA, _GET_DATA = _setter("data"), _getter("data")


class MirroredTensor(torch.Tensor):
    """A parameter or buffer whose values live on the replicas. Made by :func:`mirror_tensor`, never constructed."""

    @classmethod
    @disable_compiler  # calls to the replicas cannot be traced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        records = _records_used(func, (*args, *kwargs.values()))
        before, after = _OWNER_CALLS.get(func, ("before_values", "after_use"))
        if len(records) > 1 and before == "before_values":
            records[0].owner.want_all()
        for record in records if before else ():
            getattr(record.owner, before)(record)
        if before == "before_values" and any(record.is_meta for record in records):
            return _call_with_values(func, args, kwargs)
        with plain_tensors():
            earlier = _values_of(records) if func in _STATISTICS_WRITERS else []
            result = func(*args, **kwargs)
            for record, tensor, values in earlier:
                record.note_uncounted_write(tensor, values)
            for record in records if before == "before_values" else ():
                result = note_aliases(record, result)
            if func == _SET_DATA and records and records[0].tensor is args[0]:
                records[0].version = UNKNOWN_VERSION
                records[0].aliases = MemoryAliases()
        for record in records:
            getattr(record.owner, after)(record)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            found: torch.Tensor = memo[id(self)]
            return found
        record = record_of(self)
        record.owner.before_values(record)
        with plain_tensors():
            values = self.detach().clone(memory_format=torch.preserve_format)
        copy = _as_plain(self, record.owner.values_of(record) if record.is_meta else values)
        record.owner.copied(copy)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        record = record_of(self)
        record.owner.before_values(record)
        values = record.owner.values_of(record) if record.is_meta else None
        with plain_tensors():
            return _as_plain(self, self.detach() if values is None else values).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # its stub has no keyword
        record = record_of(self)
        record.owner.before_values(record)
        with plain_tensors():
            shown = self.detach().requires_grad_(self.requires_grad) if self.is_leaf else self.detach()
            prefix = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
            return prefix + repr(shown)


def _call_with_values(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function with values of tensors that the driver has no memory for: they are fetched for this call only."""
    if func is torch.Tensor.copy_ and isinstance(args[0], MirroredTensor) and record_of(args[0]).tensor is args[0]:
        record_of(args[0]).owner.write(record_of(args[0]), args[1])  # of load_state_dict()
        return args[0]
    fetched: list[tuple[torch.Tensor, int]] = []

    def filled(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(filled, value)) if type(value) in (list, tuple) else value
        if not isinstance(value, MirroredTensor) or not record_of(value).is_meta:
            return value
        record = record_of(value)
        values = record.owner.values_of(record)
        fetched.append((values, num_writes(values)))
        return values

    with plain_tensors():
        result = func(*map(filled, args), **{name: filled(value) for name, value in kwargs.items()})
    if any(num_writes(values) != before for values, before in fetched) or func in (_SET_DATA, _GET_DATA):
        raise FailedPreconditionError(
            'A parameter whose values only the replicas have (it was made on the device "meta") cannot be written to '
            "on the driver, nor read by .data. Read .detach(); write in a step, by load_state_dict(), or by copy_()."
        )
    return result


def note_aliases(record: TensorRecord, result: Any) -> Any:
    """Record the aliases of a mirrored tensor in a function's result; return the result.

    A tensor that shares the memory becomes a `MirroredTensor` with the same record, so that a read of it fetches
    values, too. (nn.Parameter(p), and so weight_norm, require that `detach` keeps the class.)
    """
    if isinstance(result, torch.Tensor):
        _note_tensor(record, result)
    elif isinstance(result, np.ndarray):
        record.aliases.add(weakref.ref(result))
    elif isinstance(result, list | tuple):
        for each in result:
            note_aliases(record, each)
    elif isinstance(result, Iterator):
        return iter(note_aliases(record, list(result)))
    elif isinstance(result, torch.UntypedStorage) and result.device.type == "cpu":
        return record.aliases.alias_storage(result)
    elif not isinstance(result, _WITHOUT_MEMORY):
        record.aliases.add_untracked()
    return result


_WITHOUT_MEMORY = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, type)


def _note_tensor(record: TensorRecord, result: torch.Tensor) -> None:
    tensor = record.tensor
    if tensor is None or result is tensor or (type(result) is MirroredTensor and record_of(result) is not record):
        return
    if not _may_share(result, tensor):
        return
    record.aliases.add(weakref.ref(result))
    if type(result) is torch.Tensor:
        result.__class__ = MirroredTensor
        result.__dict__[_RECORD] = record
    elif type(result) is not MirroredTensor:  # a subclass of the program's, whose aliases are not recorded
        record.aliases.add_untracked()


def _may_share(one: torch.Tensor, other: torch.Tensor) -> bool:
    if other.layout is not torch.strided:
        return False
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a functorch wrapper
        return True


def _as_plain(mirrored: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if isinstance(mirrored, torch.nn.Parameter):
        return torch.nn.Parameter(values, mirrored.requires_grad)
    return values.requires_grad_(mirrored.requires_grad)


def record_of(tensor: torch.Tensor) -> TensorRecord:
    """Return the record of a mirrored tensor, or of the mirrored tensor that an alias belongs to."""
    record: TensorRecord = tensor.__dict__[_RECORD]
    return record


def _records(values: Iterable[Any]) -> Iterator[TensorRecord]:
    for value in values:
        if isinstance(value, MirroredTensor):
            yield record_of(value)
        elif isinstance(value, list | tuple):
            yield from _records(value)


def _records_used(func: Callable[..., Any], values: Sequence[Any]) -> list[TensorRecord]:
    """Return the records of the mirrored tensors whose values, gradients or flags a function uses."""
    if func in _NO_VALUES or (func in _OWNER_CALLS and record_of(values[0]).tensor is not values[0]):
        return []  # an alias has a gradient and flags of its own
    return list(_records(values))


def _values_of(records: Iterable[TensorRecord]) -> list[tuple[TensorRecord, torch.Tensor, torch.Tensor]]:
    tensors = [(record, record.tensor) for record in records]
    return [(record, tensor, tensor.detach().clone()) for record, tensor in tensors if tensor is not None]


def mirror_tensor(tensor: torch.Tensor, handle: int, owner: TensorOwner) -> TensorRecord:
    """Make `tensor` mirrored, in place; return its record."""
    record = TensorRecord(tensor, handle, owner)
    was_parameter = isinstance(tensor, torch.nn.Parameter)
    tensor.__class__ = MirroredTensor
    tensor.__dict__[_RECORD] = record
    if was_parameter:
        mark_as_parameter(tensor)
    return record


def plain_tensor(record: TensorRecord) -> None:
    """Undo :func:`mirror_tensor`."""
    tensor = record.tensor
    if tensor is not None:
        del tensor.__dict__[_RECORD]
        unmark_as_parameter(tensor)
        tensor.__class__ = record.plain
