"""Pickling of torch objects whose default pickling does not suit replicas, and of the results of steps.

- Tensors: the pickle contains the bytes of each storage once, so that views and tied tensors still share memory.
- Results of `torch.compile` hold guards and compiled code of this process. The pickle contains the original and the
  arguments of the call, and each replica compiles again.
- Modules under `torch.nn.utils.parametrize` have a class made at run time, which torch refuses to pickle. The replica
  makes the class again from the module's `parametrizations`.
- Tensors that a step returns are packed without their autograd graph and device.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.nn.utils import parametrize

from raydist.compat.torch_internals import is_wrapped_step, module_table, plain_tensors
from raydist.core.errors import FailedPreconditionError
from raydist.parameter_servers.local_rows import RowGradient
from raydist.pickling.attribute_table import attributes
from raydist.pipelines.elements.small_floats import array_of_tensor, tensor_of_array
from raydist.utils.host_copy import begin_host_copy


def require_step_of_class(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the program has set `step` on an optimizer instance; a learning rate scheduler's wrapper is allowed.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)])
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    >>> require_step_of_class(optimizer)
    """
    replaced = attributes(optimizer).get("step")  # `vars` of a mirrored optimizer would wait for running steps
    if replaced is not None and not is_wrapped_step(replaced):
        name = type(optimizer).__name__
        raise FailedPreconditionError(
            f"An optimizer must use the `step` of its class, since replicas run that one, but this {name} has another "
            f"`step`: {replaced!r:.80}. Use register_step_pre_hook or register_step_post_hook, or derive a class."
        )


@final
class StorageBytes:
    """The storage of one or more tensors as a numpy byte array, which pickles without torch."""

    def __init__(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._array = array
        self._tensor: torch.Tensor | None = None

    def bytes_tensor(self) -> torch.Tensor:
        """Return a uint8 tensor over the memory. Every call returns the same tensor."""
        if self._tensor is None:
            array = self._array if self._array.flags.writeable else self._array.copy()
            self._tensor = torch.from_numpy(array)
        return self._tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageBytes, (self._array,)


def _rebuild_view(
    storage: StorageBytes, dtype: torch.dtype, geometry: tuple[int, tuple[int, ...], tuple[int, ...]]
) -> torch.Tensor:
    offset, size, stride = geometry
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(storage.bytes_tensor().untyped_storage(), offset, size, stride)


def _rebuild_tensor(values: torch.Tensor, device: str, requires_grad: bool) -> torch.Tensor:
    return values.to(device).requires_grad_(requires_grad)


def _rebuild_parameter(values: torch.Tensor, device: str, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.to(device), requires_grad)


@final
class ReplicaDevice:
    """A placeholder that unpickles as the device of the reading replica (see `pickler.HandlePickler`)."""


@final
class DeferredReduction:
    """An object that calls `reduce` for its pickle reduction once the pickler reaches the object."""

    def __init__(self, reduce: Callable[[], tuple[Any, ...]]) -> None:
        self._reduce = reduce

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduce()


@final
class TensorReducer:
    """A factory of pickle reductions for the tensors of one pickle. A storage that tensors share is pickled once.

    Args:
        to_replica: Move tensors to the device of the replica that unpickles them, except CPU scalars that are not
            parameters (optimizers' step counts). If False, CPU tensors stay on the CPU. GPU tensors always move.
    """

    def __init__(self, *, to_replica: bool) -> None:
        self._to_replica = to_replica
        self._replica_device = ReplicaDevice()
        self._storages: dict[tuple[int, int], StorageBytes] = {}
        self._copies: list[torch.Tensor] = []  # kept alive, because `_storages` identifies a storage by its address

    def reduce(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Return the reduction of `tensor`; None to leave it to torch (sparse, quantised, ...)."""
        with plain_tensors():
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
                return None
            if tensor.is_conj() or tensor.is_neg():  # lazy: the memory holds the values before that
                return None
            if isinstance(tensor, RowGradient):
                return None
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            to_replica_device = tensor.device.type != "cpu" or (self._to_replica and (tensor.dim() > 0 or is_parameter))
            device = self._replica_device if to_replica_device else "cpu"
            values = self._readable(tensor.detach())
            arguments = (DeferredReduction(lambda: self._reduce_view(values)), device, tensor.requires_grad)
            return _rebuild_parameter if is_parameter else _rebuild_tensor, arguments

    def _reduce_view(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        geometry = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
        return _rebuild_view, (self.storage_of(tensor), tensor.dtype, geometry)

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; for an XLA tensor, whose storage has no bytes, return a CPU copy."""
        if tensor.device.type != "xla":
            return tensor
        self._copies.append(tensor.cpu())
        return self._copies[-1]

    def storage_of(self, tensor: torch.Tensor) -> StorageBytes:
        """Return the `StorageBytes` for the storage of `tensor`: one object for all tensors that share the storage."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages[key] = StorageBytes(memory.cpu().numpy())
        return self._storages[key]


_COMPILED_MARK = "get_compiler_config"  # torch sets this attribute on every function that it compiles


def reduce_compiled(obj: Any) -> tuple[Any, ...] | None:
    """Return the pickle reduction of a compiled function or module, None for other objects."""
    original = original_of(obj)
    if original is None:
        return None
    context = _context_of(obj)
    return _compile_again, (original, {} if context is None else _arguments(context))


def original_of(obj: Any) -> Any:
    """Return the function or module that `torch.compile` has compiled to `obj`; None for other objects."""
    if isinstance(obj, types.FunctionType):
        # functools.wraps copies the attribute to a function that wraps a compiled function.
        inner = vars(obj).get("__wrapped__")
        return inner if _COMPILED_MARK in vars(obj) and _COMPILED_MARK not in getattr(inner, "__dict__", {}) else None
    if isinstance(obj, torch.nn.Module) and "dynamo_ctx" in vars(obj):
        return next(iter(module_table(obj).values()))
    return None


def _context_of(obj: Any) -> Any:
    if isinstance(obj, torch.nn.Module):
        return vars(obj)["dynamo_ctx"]
    return inspect.getclosurevars(obj).nonlocals.get("self")


def _arguments(context: Any) -> dict[str, Any]:
    """Return the keyword arguments of the `torch.compile` call that made `context`."""
    backend = _backend_of(context)
    found: dict[str, Any] = {
        "fullgraph": bool(getattr(context, "fullgraph", False)),
        "dynamic": getattr(backend, "dynamic", None),
    }
    if hasattr(backend, "compiler_fn"):
        found["backend"] = backend.compiler_fn
        found["options"] = getattr(backend, "kwargs", {}).get("options")
    elif getattr(backend, "config", None):
        found["options"] = dict(backend.config)
    return found


def _backend_of(context: Any) -> Any:
    """Search the chain of compiler callbacks for the object with the arguments of `torch.compile`; else return None."""
    waiting, seen = [getattr(context, "callback", None)], set()
    for each in waiting:
        held = getattr(each, "__dict__", {})
        if "dynamic" in held and ("compiler_fn" in held or "config" in held):
            return each
        seen.add(id(each))
        waiting += [value for value in held.values() if callable(value) and id(value) not in seen]
    return None


def _compile_again(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return torch.compile(original, **arguments)


def reduce_parametrized(module: Any) -> tuple[Any, ...] | None:
    """Return the pickle reduction of a parametrized module, None for other objects."""
    if not isinstance(module, torch.nn.Module) or not _parametrized_names(module):
        return None
    return _new, (parametrize.type_before_parametrizations(module),), attributes(module), None, None, _set_state


def match_class(module: torch.nn.Module) -> None:
    """Set the class of a module to the one that its current `parametrizations` require."""
    # Not type(module): the type of a mirrored module is a subclass of the class to compare.
    cls, names = module.__class__, _parametrized_names(module)
    plain = cls.__bases__[0] if _is_parametrized_class(cls) else cls
    if not names and plain is not cls:
        module.__class__ = plain
    elif any(not isinstance(vars(cls).get(name), property) for name in names):
        module.__class__ = _parametrized_class(plain, names)


def _parametrized_class(cls: type[torch.nn.Module], names: Sequence[str]) -> type[torch.nn.Module]:
    """Return the class that torch makes if `names` of a module of class `cls` are parametrized."""
    temporary = _new(cls)
    torch.nn.Module.__init__(temporary)
    for name in names:
        torch.nn.Module.register_parameter(temporary, name, torch.nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(temporary, name, torch.nn.Identity(), unsafe=True)
    return temporary.__class__


def _parametrized_names(module: torch.nn.Module) -> list[str]:
    held = module_table(module).get("parametrizations")
    return [] if held is None else list(module_table(held))


def _is_parametrized_class(cls: type) -> bool:
    return cls.__name__.startswith("Parametrized") and "__getstate__" in vars(cls)


def _new(cls: type[torch.nn.Module]) -> torch.nn.Module:
    return cls.__new__(cls)


def _set_state(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    attributes(module).update(state)
    match_class(module)


def by_fields(self: Any) -> tuple[type, tuple[Any, ...]]:
    """Return the pickle reduction of a dataclass with slots and no base: one call of its class.

    The default reduction is slower, because it loops over the fields in Python.

    >>> import pickle
    >>> from dataclasses import dataclass
    >>> from raydist.replicas.step import PartSource
    >>> pickle.loads(pickle.dumps(PartSource(3, place=1)))
    PartSource(object_index=3, leaf_index=0, value=None, place=1, on_host=False, nest='')
    """
    cls: Any = type(self)
    return cls, _field_getter(cls)(self)


@functools.cache
def _field_getter(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads all fields at once, in C."""
    names: tuple[str, ...] = cls.__slots__
    if len(names) == 1:
        return lambda value: (getattr(value, names[0]),)
    return operator.attrgetter(*names)


# The dtypes whose values Python numbers represent exactly.
_EXACT = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)


@final
@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as a numpy array, which the object store maps without a copy."""

    array: np.ndarray[Any, np.dtype[Any]]

    __reduce__ = by_fields

    @property
    def plain(self) -> Any:
        """The contents as a builtin or numpy object, without the classes of this package."""
        return self.array

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def unpack(self) -> torch.Tensor:
        # The object store maps the array read-only and shared; the user's tensor must be writable and private.
        tensor: torch.Tensor = tensor_of_array(self.array.copy(), torch.from_numpy)
        return tensor


@final
@dataclass(slots=True)  # nothing changes it, but a frozen one takes twice as long to unpickle, in every step
class PackedNumber:
    """A zero-dimensional tensor as a Python number, usually a loss. An array takes ten times as long to pickle.

    Attributes:
        value: The number.
        dtype: dtype of the tensor.
    """

    value: float
    dtype: torch.dtype

    __reduce__ = by_fields

    @property
    def plain(self) -> Any:
        """The contents as a builtin or numpy object, without the classes of this package."""
        return self.value

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize

    def unpack(self) -> torch.Tensor:
        return torch.tensor(self.value, dtype=self.dtype)


Packed = PackedTensor | PackedNumber


@final
class PendingTensor:
    """A GPU tensor that is being copied to the host.

    Args:
        read: Function that waits for the copy and returns the tensor on the host.
    """

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def wait(self) -> Packed | torch.Tensor:
        """Wait for the copy, and return the packed tensor."""
        return pack_tensor(self._read())


def begin_packing(tensor: torch.Tensor) -> Packed | torch.Tensor | PendingTensor:
    """Pack a tensor as `pack_tensor` does; for a GPU tensor, start the copy to the host and return without waiting."""
    if tensor.is_cuda and tensor.layout is torch.strided:
        return PendingTensor(begin_host_copy(tensor))
    return pack_tensor(tensor)


def pack_tensor(tensor: torch.Tensor) -> Packed | torch.Tensor:
    """Detach a tensor, copy it to the CPU, and pack it. Waits for a GPU.

    A layout that numpy does not have (sparse, quantised, ...) is not packed: the result is a plain tensor.

    >>> pack_tensor(torch.tensor(0.5, requires_grad=True)).unpack()
    tensor(0.5000)
    """
    if tensor.dim() == 0 and tensor.dtype in _EXACT and tensor.layout is torch.strided:
        return PackedNumber(tensor.item(), tensor.dtype)
    plain = tensor.detach().cpu()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    try:
        return PackedTensor(array_of_tensor(plain).copy())
    except (TypeError, RuntimeError):  # sparse, quantised, ...
        return plain.clone()
