"""The objects of a checkpoint: capture their states, and restore states into them."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

from torch import nn

from raydist.checkpoints.capture import Capture, CapturedObject, captured_object
from raydist.checkpoints.entries import pack_state, unpack_state
from raydist.checkpoints.manifest import SavedCheckpoint, SavedObject, open_checkpoint
from raydist.checkpoints.object_state import (
    PendingGradients,
    aliases_of,
    class_of_state,
    kind_of_state,
    named_objects,
    state_of,
)
from raydist.checkpoints.random_state import are_random_states, random_states, set_random_states
from raydist.checkpoints.restore import RestoreReport, chosen_objects, restore_objects
from raydist.context.current import StepCounter, TrainingStrategy, open_strategies, training_strategy
from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.pipelines.stored.directory_files import DirectoryFiles

_STEP = "global_step"
_GRADIENTS = "gradients"
_ROWS = "embedding_rows"
_NO_STRATEGY = (
    "The global step of the checkpoint is left out: no scope is open, no strategy has made one of the modules, and "
    "there is no strategy, or several. Make the Checkpoint under the scope of the strategy that trains."
)


@final
class CheckpointContents:
    """The objects of a checkpoint, independent of a directory."""

    def __init__(self, objects: Mapping[str, Any], gradients: bool = False) -> None:
        self._objects = dict(objects)
        self._fit_objects: Mapping[
            str, Any
        ] = {}  # of the current `fit`, or of the last one if it ended without an error
        self._includes_fit = False
        self._gradients = gradients
        self._overrides: Mapping[str, Any] = {}
        self._strategy: weakref.ref[TrainingStrategy] | None = None
        self._find_strategy()

    @property
    def has_gradients(self) -> bool:
        """True if pending gradients of modules are included."""
        return self._gradients

    def own_objects(self) -> dict[str, Any]:
        """Return the objects passed to the constructor, by name."""
        return named_objects(self._objects)

    def named(self) -> dict[str, Any]:
        """Return all objects by name, with the current members of dicts and lists."""
        named = self._own_and_fit()
        named = {**named, **_rows_of(named), **self._step_beside(named)}
        if self._gradients:
            aliases = aliases_of(named)
            modules = {name: obj for name, obj in _modules(named).items() if not isinstance(obj, StepCounter)}
            gradients = {name: PendingGradients(each) for name, each in modules.items() if name not in aliases}
            named |= named_objects({_GRADIENTS: gradients})
        return named

    def _find_strategy(self) -> TrainingStrategy | None:
        """Return the strategy whose global step is saved; searched again at each call until exactly one is found."""
        known = None if self._strategy is None else self._strategy()
        found = training_strategy(_modules(self._own_and_fit()).values()) if known is None else known
        self._strategy = None if found is None else weakref.ref(found)
        return found

    def _own_and_fit(self) -> dict[str, Any]:
        return named_objects({**self._objects, **(self._fit_objects if self._includes_fit else {})})

    def _step_beside(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the global step counter if the program uses one and the named objects do not include it."""
        strategy = self._find_strategy()
        counter = None if strategy is None else strategy._find_counter()
        known = counter is None or _STEP in named or any(obj is counter for obj in named.values())
        return {} if known else {_STEP: counter}

    def _named_as(self, checkpoint: SavedCheckpoint) -> dict[str, Any]:
        """Return all objects by name, including the global step if the checkpoint has one."""
        named = self.named()
        if _STEP in self._objects:  # the program's own object of that name
            return named
        named.pop(_STEP, None)
        if _STEP not in checkpoint.manifest.objects:
            return named
        strategy = self._find_strategy()
        if strategy is None:
            warnings.warn(_NO_STRATEGY, RuntimeWarning, stacklevel=5)
        counter = StepCounter() if strategy is None else strategy._make_counter()
        old = f"{_GRADIENTS}.{_STEP}"  # the counter has no gradient, but older checkpoints have this entry
        beside = {old: PendingGradients(counter)} if old in checkpoint.manifest.objects else {}
        return {**named, _STEP: counter, **beside}

    @contextlib.contextmanager
    def during_fit(self, objects: Mapping[str, Any]) -> Iterator[None]:
        """Include the objects of a `fit` in the checkpoint for the `with` block."""
        if taken := sorted(self._objects.keys() & objects.keys()):
            raise InvalidArgumentError(f"A checkpoint must not have an object called {taken[0]!r} here. Rename it.")
        self._fit_objects = dict(objects)
        with self.with_last_fit():
            try:
                self.named()  # raises for an object without state
                yield
            except BaseException:
                self._fit_objects = {}
                raise

    @contextlib.contextmanager
    def with_last_fit(self) -> Iterator[None]:
        """Include the objects of the last `fit` for the `with` block: a save after a `fit` lets the next one resume."""
        before, self._includes_fit = self._includes_fit, True
        try:
            yield
        finally:
            self._includes_fit = before

    @contextlib.contextmanager
    def overriding(self, states: Mapping[str, Any]) -> Iterator[None]:
        """Use these states for the objects of these names inside the `with` block."""
        self._overrides = dict(states)
        try:
            yield
        finally:
            self._overrides = {}

    def capture(
        self, copy: bool = True, details: Mapping[str, Any] | None = None, skip: Collection[str] = ()
    ) -> Capture:
        """Return a snapshot of the current states, except of the objects in `skip`. Blocks for dispatched steps.

        With `copy`, training may continue before the tensors are written. `details` are stored in the manifest.
        """
        named = self.named()
        aliases = aliases_of(named)
        modules = _modules(named)
        objects: dict[str, CapturedObject] = {}
        for name, obj in named.items():
            kind = kind_of_state(obj)
            if name in skip:
                continue
            if name in aliases:
                objects[name] = CapturedObject(SavedObject(kind, same_as=aliases[name]))
            else:
                state = self._overrides[name] if name in self._overrides else state_of(obj, modules)
                objects[name] = captured_object(name, kind, class_of_state(obj), state, copy)
        return Capture(objects, pack_state(random_states()).values, dict(details or {}))

    def restore(
        self, directory: DirectoryFiles, strict: bool = True, only: Sequence[str] | str | None = None
    ) -> RestoreReport:
        """Load the states of a checkpoint directory into the objects. See `rd.Checkpoint.restore`."""
        named = self.named()
        wanted = chosen_objects(named, only)
        checkpoint = open_checkpoint(directory)
        if only is None:
            named = wanted = self._named_as(checkpoint)
        random = None if only is not None else _random_states_of(checkpoint)
        restorers = [each for strategy in open_strategies() if (each := strategy._find_restorer()) is not None]
        report = restore_objects(named, wanted, checkpoint, strict, whole=only is None, restorers=restorers)
        if random is not None:
            set_random_states(random)
        return report


def _rows_of(named: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of embedding tables, which `state_dict` of their modules leaves out."""
    aliases = aliases_of(named)
    tables = {name: SavedRows(module) for name, module in _modules(named).items() if name not in aliases}
    return {f"{name}.{_ROWS}": rows for name, rows in tables.items() if rows}


def _modules(named: dict[str, Any]) -> dict[str, nn.Module]:
    return {name: obj for name, obj in named.items() if isinstance(obj, nn.Module)}


def _random_states_of(checkpoint: SavedCheckpoint) -> Any:
    values = checkpoint.manifest.random
    try:
        states = None if values is None else unpack_state(values, {})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise checkpoint.loss(f"its random states are invalid: {error!s:.300}") from error
    if states is not None and not are_random_states(states):
        raise checkpoint.loss("its random states are invalid")
    return states
