"""The record of the objects that are created under `strategy.scope()`, and the check that steps use only these.

PyTorch calls hooks when a module registers a parameter, a buffer or a submodule; inside the scope the hooks record the
registered object. The patched constructor of `Parameter` records parameters without a module, and the patched
`Module.__setstate__` records modules that are copied or unpickled, which register nothing.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from raydist.compat.torch_internals import buffer_table, module_table, parameter_table, plain_tensors
from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.objects import is_mirrored_class
from raydist.mirroring.tensor import MirroredTensor, record_of
from raydist.parameter_servers.local_rows import spec_of
from raydist.parameter_servers.sharded_embedding import ShardedEmbedding
from raydist.pickling.attribute_table import attributes
from raydist.sharding.initial_values import INITIAL_VALUES

_active: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("raydist_scope", default=None)


@final
class Scope:
    """The objects created under one strategy, by weak reference."""

    def __init__(self) -> None:
        self._marks: dict[int, weakref.ref[Any]] = {}
        self._adopt: Callable[[Any], None] | None = None
        self.has_tables = False  # True once a `ShardedEmbedding` was created here

    def mark(self, obj: Any) -> None:
        """Record that `obj` was created under this scope."""
        if self._adopt is not None:
            self._adopt(obj)
        self.has_tables |= isinstance(obj, ShardedEmbedding)
        key = id(obj)
        self._marks[key] = weakref.ref(obj, lambda _: self._marks.pop(key, None))

    def __contains__(self, obj: Any) -> bool:
        ref = self._marks.get(id(obj))
        return ref is not None and ref() is obj

    def objects(self) -> list[Any]:
        """Return the recorded objects that still live."""
        return [obj for ref in list(self._marks.values()) if (obj := ref()) is not None]

    @property
    def is_active(self) -> bool:
        """Return True if this scope is the innermost one around the caller."""
        return _active.get() is self

    @contextmanager
    def enter(self, adopt: Callable[[Any], None] | None = None) -> Iterator[None]:
        """Record the objects that this thread creates inside the block; `adopt` is called with each object."""
        token = _active.set(self)
        self._adopt = adopt or self._adopt
        with ExitStack() as stack:
            stack.callback(_active.reset, token)
            for register in (
                torch_module.register_module_parameter_registration_hook,
                torch_module.register_module_buffer_registration_hook,
                torch_module.register_module_module_registration_hook,
            ):
                stack.callback(register(self._registered).remove)
            # torch has no hooks for parameters without a module, nor for modules that deepcopy and pickle create.
            stack.enter_context(_replaced(torch.nn.Parameter, "__new__", self._constructing))
            stack.enter_context(_replaced(torch.nn.Module, "__setstate__", self._restoring))
            yield

    def _registered(self, module: torch.nn.Module, name: str, value: Any) -> None:
        if self.is_active:
            self.mark(module)
            if value is not None:
                self.mark(value)

    def _constructing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
            parameter = original(cls, *args, **kwargs)
            if self.is_active:
                self.mark(parameter)
            return parameter

        return construct

    def _restoring(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def restore(module: torch.nn.Module, state: Any) -> None:
            original(module, state)
            if self.is_active:
                self.mark(module)

        return restore


@contextmanager
def _replaced(cls: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a method of a class by `make(method)` inside the block."""
    original = getattr(cls, name)
    setattr(cls, name, make(original))
    try:
        yield
    finally:
        setattr(cls, name, original)


@final
class ScopeCheck:
    """The scope check of one strategy.

    `devices` returns the device types ("cuda") that variables may be on besides "cpu"; `known` has the objects that
    earlier steps used; `serves_rows` returns True if the strategy stores rows of embedding tables.
    """

    def __init__(
        self,
        name: str,
        scope: Scope,
        devices: Callable[[], Collection[str]],
        known: DriverTable,
        *,
        serves_rows: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = name
        self._devices = devices
        self.scope = scope
        self._known = known
        self._serves_rows = serves_rows

    def refuse_foreign(self, obj: Any) -> None:
        """Raise if `obj`, which this strategy does not mirror, is mirrored by another strategy."""
        is_tensor = type(obj) is MirroredTensor
        if record_of(obj).tensor is obj if is_tensor else is_mirrored_class(type(obj)):
            raise FailedPreconditionError(
                f"A step may use the variables of one strategy; {title(obj)} belongs to another one than "
                f"{self._name}. Create it under this strategy's scope, or call run() of its own strategy."
            )

    def require(self, new: Sequence[Any]) -> None:
        """Raise unless all objects that no step has used before, outer modules first, were created under the scope."""
        orders = [obj for obj in new if isinstance(obj, torch.nn.Module) and INITIAL_VALUES in attributes(obj)]
        made_there = {id(each) for module in orders for each in (*module.parameters(), *module.buffers())}
        for obj in new:
            if isinstance(obj, torch.Tensor) and id(obj) not in made_there:
                self.require_device(obj, new)
            if isinstance(obj, torch.nn.Parameter):
                self._require_parameter(obj, new)
        for obj in new:
            if isinstance(obj, torch.nn.Module) and not self._is_made_here(obj):
                raise FailedPreconditionError(
                    f"Modules that a step uses must be made under the scope of {self._name}; a {type(obj).__name__} "
                    f"was not. Create it inside `with strategy.scope():`."
                )

    def require_device(self, tensor: torch.Tensor, new: Sequence[Any] = ()) -> None:
        """Raise if a variable was moved to a device type that the strategy does not use."""
        device = tensor.device
        if device.type == "cpu" or device.type in self._devices():
            return
        kinds = " or ".join(sorted({"cpu", *self._devices()}))
        raise FailedPreconditionError(
            f"Variables must be where their strategy has them ({kinds}); {self._place(tensor, new)} was moved to "
            f"{device}. Leave out .to(device): each replica has the model, and gets its batches, on its own device."
            + (" A module that was built on meta gets values by rd.materialize(module)." if tensor.is_meta else "")
        )

    def _require_parameter(self, parameter: torch.nn.Parameter, new: Sequence[Any]) -> None:
        if is_lazy(parameter):
            raise FailedPreconditionError(
                f"Parameters must be initialised before a step uses them, {self._place(parameter, new)} is lazy. "
                f"Call the module once on an example under the scope."
            )
        if spec_of(parameter) is not None and not self._serves_rows():
            raise FailedPreconditionError(
                "Rows of a ShardedEmbedding must lie on parameter servers, or be divided among CPU or GPU replicas "
                f"that get different rows of a batch, but {self._name} has neither. Use ParameterServerStrategy, "
                "MirroredStrategy, MultiWorkerMirroredStrategy, ShardedStrategy or OneDeviceStrategy, or "
                "torch.nn.Embedding, which replicas have whole."
            )
        if parameter not in self.scope:
            raise FailedPreconditionError(
                f"Everything that a step trains must be made under the scope of {self._name}; "
                f"{self._place(parameter, new)} was not. Create it inside `with strategy.scope():`."
            )

    def _is_made_here(self, module: torch.nn.Module) -> bool:
        if module in self.scope:  # a cast or a move may have replaced the buffers since
            return True
        tensors = [*module.parameters(), *module.buffers()]
        return not tensors or any(each in self.scope or self._known.handle_of(each) is not None for each in tensors)

    def _place(self, parameter: torch.Tensor, new: Sequence[Any]) -> str:
        """Describe the place of a parameter or buffer in the new objects and in the known ones."""
        known = [obj for _, obj in self._known.objects()]
        inner, outer = (next(_places(objects, parameter), "") for objects in (new, known))
        if inner and outer:
            return f"{inner} ({outer})"
        return inner or outer or title(parameter)


def _places(objects: Sequence[Any], parameter: torch.Tensor) -> Iterator[str]:
    """Yield descriptions of the places of a parameter: in outermost modules first, then in optimizers."""
    for obj in objects:
        if isinstance(obj, torch.nn.Module) and (name := _name_in(obj, parameter)):
            kind = "parameter" if isinstance(parameter, torch.nn.Parameter) else "buffer"
            yield f"{kind} {name!r} of module {type(obj).__name__}"
    for obj in objects:
        groups = attributes(obj)["param_groups"] if isinstance(obj, torch.optim.Optimizer) else ()
        for index, group in enumerate(groups):
            if any(found is parameter for found in group["params"]):
                yield f"a parameter in param_groups[{index}] of optimizer {type(obj).__name__}"


def _name_in(module: torch.nn.Module, parameter: torch.Tensor) -> str:
    """Return the name of a parameter in a module, without attribute access: a mirrored module would call replicas."""
    waiting, seen = [("", module)], {id(module)}
    for prefix, current in waiting:
        own = {**parameter_table(current), **buffer_table(current)}
        found = next((name for name, tensor in own.items() if tensor is parameter), "")
        if found:
            return prefix + found
        children = [(name, child) for name, child in module_table(current).items() if child is not None]
        waiting += [(f"{prefix}{name}.", child) for name, child in children if id(child) not in seen]
        seen.update(id(child) for _, child in children)
    return ""


def title(obj: Any) -> str:
    """Return a description of an object for messages."""
    if isinstance(obj, torch.Tensor):
        with plain_tensors():
            return f"a {'parameter' if isinstance(obj, torch.nn.Parameter) else 'buffer'} of shape {tuple(obj.shape)}"
    return f"a {type(obj).__name__}"
