"""Finding what a step reaches that the replicas do not have, and shipping it once, in one pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

from raydist.class_memory import remembered_by_class
from raydist.collectives.reducer.parameter_hooks import ParameterHooks
from raydist.compat.torch_internals import BUFFERS, buffer_table
from raydist.errors import FailedPreconditionError
from raydist.mirroring.driver_hooks import HOOKS_OF_DRIVER
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.kinds import kind_of, kind_of_class
from raydist.mirroring.origin import Origin, title
from raydist.mirroring.scope import Scope
from raydist.mirroring.shipment import Writes
from raydist.mirroring.tensor import MirroredTensor, record_of
from raydist.pickling.by_value import Reach
from raydist.pickling.culprit import find_culprit
from raydist.pickling.pickler import HandlePickler, PersistentId, WithGlobals, dumps
from raydist.values import PerReplica

__all__ = ["Discovery"]


@remembered_by_class
def is_candidate_class(cls: Any) -> bool:
    """Whether objects of a class may travel as handles or placeholders."""
    return issubclass(cls, torch.Tensor | PerReplica) or kind_of_class(cls) is not None


@final
class Discovery:
    """One look at what a step reaches. Nothing is changed until the driver takes over `new`.

    Attributes:
        new: Objects without a handle so far, with the handles they shall get.
        per_replica: PerReplica leaves in the order of their placeholders.
    """

    def __init__(self, table: DriverTable, scope: Scope, origin: Origin, externals: Mapping[str, Any]) -> None:
        self._table = table
        self._scope = scope
        self._origin = origin
        self._externals = {id(obj): key for key, obj in externals.items()}
        self._handles: dict[int, int] = {}
        self.new: list[tuple[int, Any]] = []
        self.per_replica: list[PerReplica] = []

    def pickle(self, obj: Any, what: str) -> bytes:
        """Pickle a function or its arguments; mirrored objects become handles.

        Args:
            obj: What to pickle.
            what: Its name in messages.
        """
        with self._explaining(obj, what):
            return dumps(obj, self._identify, reach=Reach(self._is_shared))

    def pickle_function(self, fn: Any) -> bytes:
        """Pickle a step function, and the numbers and text of the modules whose functions it calls."""
        reach = Reach(self._is_shared)
        with self._explaining(fn, f"the step function {getattr(fn, '__name__', type(fn).__name__)!r}"):
            return dumps(WithGlobals(fn, reach), self._identify, reach=reach)

    def adopt_buffers(self, writes: Writes) -> None:
        """Let tensors that the program has put in the places of mirrored modules' buffers (a cast does) be mirrored."""
        for changes in writes.control.values():
            for path, value in changes.items():
                is_buffer = path[0] == BUFFERS and len(path) == 2 and type(value) is torch.Tensor
                if is_buffer and self._table.handle_of(value) is None:
                    self._handle(value)

    def is_elsewhere(self, obj: Any) -> bool:
        """Whether every replica has `obj`: it travels as a handle or under a name, whatever is in it."""
        return self._table.handle_of(obj) is not None or id(obj) in self._externals

    def bundle(self) -> bytes:
        """Pickle of every new object, of those they lead to, of their hooks and gradients; empty if there are none."""
        if not self.new:
            return b""
        file = io.BytesIO()
        pickler = HandlePickler(file, self._identify_in_bundle, reach=Reach(self._is_shared), to_replica=True)
        with self._explaining([obj for _, obj in self.new], "what the step uses"):
            pickler.dump([obj for _, obj in self.new])
            self._dump_hooks(pickler)
            pickler.dump(self.new)
            pickler.dump(self._gradients())
        self._origin.require([obj for _, obj in self.new])
        return file.getvalue()

    def _dump_hooks(self, pickler: HandlePickler) -> None:
        """Hooks on new parameters by handle, then None. They may lead to further parameters with hooks of their own."""
        for handle, obj in self.new:
            hooks = ParameterHooks.of(obj) if isinstance(obj, torch.nn.Parameter) else None
            if hooks:
                with self._explaining([*hooks.before.values(), *hooks.after.values()], f"the hooks on {title(obj)}"):
                    pickler.dump((handle, hooks.under(HOOKS_OF_DRIVER)))
        pickler.dump(None)

    def _gradients(self) -> dict[int, torch.Tensor]:
        """What a backward pass or the program left on new parameters: their pickles do not hold it."""
        parameters = [(handle, obj) for handle, obj in self.new if isinstance(obj, torch.nn.Parameter)]
        return {handle: obj.grad.detach() for handle, obj in parameters if obj.grad is not None}

    @contextmanager
    def _explaining(self, obj: Any, what: str) -> Iterator[None]:
        """Turn the error of a pickler into one that says where the culprit is."""
        try:
            yield
        except (TypeError, AttributeError, pickle.PicklingError, NotImplementedError, RuntimeError) as error:
            culprit = find_culprit(obj, self._can_pickle)
            raise FailedPreconditionError(
                f"What a step reaches is sent to the replicas and must be picklable. In {what}, this is not: {culprit} "
                f"({error}). Create it inside the function, or keep it out of its reach."
            ) from error

    def _can_pickle(self, obj: Any) -> bool:
        try:
            dumps(obj, self._identify_quietly, reach=Reach(self._is_shared))
        except Exception:  # whatever it is, it is what we look for
            return False
        return True

    def _identify_quietly(self, obj: Any) -> PersistentId | None:
        return ("object", 0) if self._is_candidate(obj) and self._elsewhere_quietly(obj) else None

    def _identify(self, obj: Any) -> PersistentId | None:
        if not self._is_candidate(obj):
            return None
        pid = self._elsewhere(obj)
        if pid is None and self._is_mirrorable(obj):
            return "object", self._handle(obj)
        if pid is None and type(obj) is MirroredTensor:  # it shares memory with a variable: a copy of fresh values
            record_of(obj).owner.before_values(record_of(obj))
        return pid

    def _identify_in_bundle(self, obj: Any) -> PersistentId | None:
        if not self._is_candidate(obj):
            return None
        pid = self._elsewhere(obj)
        if pid is None and self._is_mirrorable(obj):
            self._handle(obj)
        return pid

    def _is_candidate(self, obj: Any) -> bool:
        """Whether a second look is worth while: almost everything in a pickle is a name or a number."""
        cls: Any = type(obj)
        return is_candidate_class(cls) or id(obj) in self._externals

    def _elsewhere(self, obj: Any) -> PersistentId | None:
        """The persistent id of what every replica has already."""
        handle = self._table.handle_of(obj)
        if handle is not None:
            return "object", handle
        if isinstance(obj, PerReplica):
            return self._part(obj)
        name = self._externals.get(id(obj))
        return None if name is None else ("external", name)

    def _part(self, value: PerReplica) -> PersistentId:
        for index, known in enumerate(self.per_replica):
            if known is value:
                return "part", index
        self.per_replica.append(value)
        return "part", len(self.per_replica) - 1

    def _handle(self, obj: Any) -> int:
        if id(obj) not in self._handles:
            # What is ours has a handle already and does not come here.
            self._origin.refuse_foreign(obj)
            self._handles[id(obj)] = self._table.reserve()
            self.new.append((self._handles[id(obj)], obj))
            if isinstance(obj, torch.nn.Module):
                self._add_buffers(obj)
        return self._handles[id(obj)]

    def _add_buffers(self, module: torch.nn.Module) -> None:
        """Buffers are told from other tensors by the module that registered them."""
        for buffer in buffer_table(module).values():
            if buffer is not None and self._table.handle_of(buffer) is None:
                self._handle(buffer)

    def _is_shared(self, obj: Any) -> bool:
        """Whether a function that reaches `obj` must not be imported by the replicas."""
        return self._is_candidate(obj) and (self._elsewhere_quietly(obj) or self._is_mirrorable(obj))

    def _elsewhere_quietly(self, obj: Any) -> bool:
        return self.is_elsewhere(obj) or isinstance(obj, PerReplica)

    def _is_mirrorable(self, obj: Any) -> bool:
        if isinstance(obj, torch.Tensor):
            return isinstance(obj, torch.nn.Parameter) or id(obj) in self._handles or obj in self._scope
        return kind_of(obj) is not None
