"""Pickle a step. Each object that the step references and the replicas do not have is pickled once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch

from raydist.collectives.reducer.parameter_hooks import ParameterHooks
from raydist.compat.torch_internals import BUFFERS, buffer_table
from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.core.weak_class_cache import remembered_by_class
from raydist.mirroring.gradients import HOOKS_OF_DRIVER
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.messages import StepPayload, Writes
from raydist.mirroring.object_kinds import kind_of, kind_of_class
from raydist.mirroring.scope import ScopeCheck, title
from raydist.mirroring.tensor import MirroredTensor, record_of
from raydist.pickling.attribute_table import attributes
from raydist.pickling.by_value import ByValuePolicy, closure_variables, referenced_globals
from raydist.pickling.pickler import HandlePickler, PersistentId, dumps, with_globals


@remembered_by_class
def is_candidate_class(cls: Any) -> bool:
    """Return True if objects of a class may be pickled as handles or placeholders."""
    return issubclass(cls, torch.Tensor | PerReplica) or kind_of_class(cls) is not None


@final
class StepPickler:
    """The pickling of one step. Pickling changes no object; the driver adopts `new` afterwards.

    Attributes:
        new: Pairs of a reserved handle and an object that had no handle before.
        per_replica: PerReplica leaves in the order of their placeholders.
    """

    def __init__(self, table: DriverTable, scope_check: ScopeCheck, injected: Mapping[str, Any]) -> None:
        self._table = table
        self._scope_check = scope_check
        self._injected = {id(obj): key for key, obj in injected.items()}
        self._handles: dict[int, int] = {}
        self.new: list[tuple[int, Any]] = []
        self.per_replica: list[PerReplica] = []

    def pickle(self, obj: Any, what: str) -> bytes:
        """Pickle a function or its arguments, called `what` in messages; mirrored objects become handles."""
        with self._naming_errors(obj, what):
            return dumps(obj, self._identify, policy=ByValuePolicy(self._is_shared))

    def pickle_function(self, fn: Any) -> bytes:
        """Pickle a step function, with the numbers and strings among the globals that the user's functions read."""
        policy = ByValuePolicy(self._is_shared)
        with self._naming_errors(fn, f"the step function {getattr(fn, '__name__', type(fn).__name__)!r}"):
            return dumps(with_globals(fn, policy), self._identify, policy=policy)

    def adopt_buffers(self, writes: Writes) -> None:
        """Reserve handles for new buffers of mirrored modules: a cast, for example, replaces buffers."""
        for changes in writes.control.values():
            for path, value in changes.items():
                is_buffer = path[0] == BUFFERS and len(path) == 2 and type(value) is torch.Tensor
                if is_buffer and self._table.handle_of(value) is None:
                    self._handle(value)

    def is_elsewhere(self, obj: Any) -> bool:
        """Return True if every replica has `obj` already, by handle or by name."""
        return self._table.handle_of(obj) is not None or id(obj) in self._injected

    def bundle(self) -> bytes:
        """Pickle every new object with its references, hooks and gradients; return b"" if there is none."""
        if not self.new:
            return b""
        file = io.BytesIO()
        pickler = HandlePickler(file, self._identify_in_bundle, policy=ByValuePolicy(self._is_shared), to_replica=True)
        with self._naming_errors([obj for _, obj in self.new], "what the step uses"):
            pickler.dump([obj for _, obj in self.new])
            self._dump_hooks(pickler)
            pickler.dump(self.new)
            pickler.dump(self._gradients())
        self._scope_check.require([obj for _, obj in self.new])
        return file.getvalue()

    def _dump_hooks(self, pickler: HandlePickler) -> None:
        """Pickle the hooks on new parameters by handle, then None. Hooks may add further parameters to `new`."""
        for handle, obj in self.new:
            hooks = ParameterHooks.of(obj) if isinstance(obj, torch.nn.Parameter) else None
            if hooks:
                with self._naming_errors([*hooks.before.values(), *hooks.after.values()], f"the hooks on {title(obj)}"):
                    pickler.dump((handle, hooks.under(HOOKS_OF_DRIVER)))
        pickler.dump(None)

    def _gradients(self) -> dict[int, torch.Tensor]:
        """Return the gradients of new parameters, which the pickles of parameters do not contain."""
        parameters = [(handle, obj) for handle, obj in self.new if isinstance(obj, torch.nn.Parameter)]
        return {handle: obj.grad.detach() for handle, obj in parameters if obj.grad is not None}

    @contextlib.contextmanager
    def _naming_errors(self, obj: Any, what: str) -> Iterator[None]:
        """Turn a pickling error into one that names the object that cannot be pickled."""
        try:
            yield
        except (TypeError, AttributeError, pickle.PicklingError, NotImplementedError, RuntimeError) as error:
            path = pickle_error_path(obj, self._can_pickle)
            raise FailedPreconditionError(
                f"What a step reaches is sent to the replicas and must be picklable. In {what}, this is not: {path} "
                f"({error}). Create it inside the function, or keep it out of its reach."
            ) from error

    def _can_pickle(self, obj: Any) -> bool:
        try:
            dumps(obj, self._identify_existing, policy=ByValuePolicy(self._is_shared))
        except Exception:  # any error means that the object cannot be pickled
            return False
        return True

    def _identify_existing(self, obj: Any) -> PersistentId | None:
        return ("object", 0) if self._is_candidate(obj) and self._has_id(obj) else None

    def _identify(self, obj: Any) -> PersistentId | None:
        if not self._is_candidate(obj):
            return None
        pid = self._existing_id(obj)
        if pid is None and self._is_mirrorable(obj):
            return "object", self._handle(obj)
        if pid is None and type(obj) is MirroredTensor:  # shares memory with a variable
            record_of(obj).owner.before_values(record_of(obj))  # the pickle contains fresh values
        return pid

    def _identify_in_bundle(self, obj: Any) -> PersistentId | None:
        if not self._is_candidate(obj):
            return None
        pid = self._existing_id(obj)
        if pid is None and self._is_mirrorable(obj):
            self._handle(obj)
        return pid

    def _is_candidate(self, obj: Any) -> bool:
        """Return True if `obj` may need a persistent id: a cheap test, because most objects in a pickle need none."""
        cls: Any = type(obj)
        return is_candidate_class(cls) or id(obj) in self._injected

    def _existing_id(self, obj: Any) -> PersistentId | None:
        """Return the persistent id of an object that every replica has already, else None."""
        handle = self._table.handle_of(obj)
        if handle is not None:
            return "object", handle
        if isinstance(obj, PerReplica):
            return self._per_replica_id(obj)
        name = self._injected.get(id(obj))
        return None if name is None else ("injected", name)

    def _per_replica_id(self, value: PerReplica) -> PersistentId:
        for index, known in enumerate(self.per_replica):
            if known is value:
                return "part", index
        self.per_replica.append(value)
        return "part", len(self.per_replica) - 1

    def _handle(self, obj: Any) -> int:
        if id(obj) not in self._handles:
            # Objects of this strategy already have a handle, and do not reach this line.
            self._scope_check.refuse_foreign(obj)
            self._handles[id(obj)] = self._table.reserve()
            self.new.append((self._handles[id(obj)], obj))
            if isinstance(obj, torch.nn.Module):
                self._add_buffers(obj)
        return self._handles[id(obj)]

    def _add_buffers(self, module: torch.nn.Module) -> None:
        """Reserve handles for the buffers of a module: only the module distinguishes buffers from other tensors."""
        for buffer in buffer_table(module).values():
            if buffer is not None and self._table.handle_of(buffer) is None:
                self._handle(buffer)

    def _is_shared(self, obj: Any) -> bool:
        """Return True if a function that references `obj` must be pickled by value."""
        return self._is_candidate(obj) and (self._has_id(obj) or self._is_mirrorable(obj))

    def _has_id(self, obj: Any) -> bool:
        return self.is_elsewhere(obj) or isinstance(obj, PerReplica)

    def _is_mirrorable(self, obj: Any) -> bool:
        if isinstance(obj, torch.Tensor):
            return isinstance(obj, torch.nn.Parameter) or id(obj) in self._handles or obj in self._scope_check.scope
        return kind_of(obj) is not None


_KEPT = 64  # functions in each replica's cache


@final
class SentFunctions:
    """The step functions in the `FunctionCache` of each replica. A function is sent once, and again after a change."""

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def pickle(self, pickler: StepPickler, fn: Any) -> tuple[bytes, bytes]:
        """Return the pickled function (empty if the replicas have it) and the digest of the pickle."""
        function = pickler.pickle_function(fn)
        if pickler.per_replica:  # a function that holds PerReplica values differs in every step
            return function, b""
        digest = hashlib.blake2b(function, digest_size=16).digest()
        return b"" if digest in self._sent else function, digest

    def too_many(self, digest: bytes) -> tuple[bytes, ...]:
        """Return the digest of the least recently used function if the cache is full and `digest` is new."""
        full = digest and digest not in self._sent and len(self._sent) >= _KEPT
        return (next(iter(self._sent)),) if full else ()

    def mark_sent(self, payload: StepPayload) -> None:
        """Record that a payload was sent."""
        if payload.digest:
            self._sent[payload.digest] = None
            self._sent.move_to_end(payload.digest)
        for digest in payload.forget:
            del self._sent[digest]

    def forget(self) -> None:
        """Drop all records: the replicas have lost their functions."""
        self._sent.clear()


_DEPTH = 12  # maximum length of a path


def pickle_error_path(root: Any, can_pickle: Callable[[Any], bool]) -> str:
    """Return the path from `root` to the innermost object that cannot be pickled, and the object's type.

    >>> import threading
    >>> pickle_error_path({"a": 1, "locks": [threading.Lock()]}, lambda obj: "lock" not in repr(obj))
    "['locks'], [0]: _thread.lock"
    """
    way: list[str] = []
    obj, seen = root, {id(root)}
    while len(way) < _DEPTH:
        for name, child in _named_children(obj):
            if id(child) not in seen and not can_pickle(child):
                seen.add(id(child))
                way.append(name)
                obj = child
                break
        else:
            break
    cls = type(obj)
    return f"{', '.join(way) or 'the object itself'}: {cls.__module__}.{cls.__qualname__}"


def _named_children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.FunctionType):
        yield from _of_function(obj)
    elif isinstance(obj, types.MethodType):
        yield f"self of {obj.__func__.__qualname__}", obj.__self__
        yield f"method {obj.__func__.__qualname__}", obj.__func__
    elif isinstance(obj, functools.partial):
        yield "function of a partial", obj.func
        yield "arguments of a partial", obj.args
        yield "keyword arguments of a partial", obj.keywords
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif not isinstance(obj, type | types.ModuleType):
        yield from ((f"attribute {key!r} of {type(obj).__name__}", value) for key, value in _attributes(obj).items())


def _attributes(obj: Any) -> dict[str, Any]:
    with contextlib.suppress(AttributeError):  # a weak proxy forwards hasattr to its referent
        return attributes(obj)
    names = [field.name for field in dataclasses.fields(obj)] if dataclasses.is_dataclass(obj) else []
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name = function.__name__
    for variable, value in closure_variables(function).items():
        yield f"closure variable {variable!r} of {name}", value
    for variable, value in referenced_globals(function).items():
        yield f"global {variable!r} of {name}", value
    for value in function.__defaults__ or ():
        yield f"a default of {name}", value
    for keyword, value in (function.__kwdefaults__ or {}).items():
        yield f"default of {keyword!r} of {name}", value
