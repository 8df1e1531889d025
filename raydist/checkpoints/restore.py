"""Restore saved states into objects: everything is read and compared before any object changes.

Replicas or parameter servers restore the objects that they hold: they read and verify first, and change objects at
the end.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, final

from torch import nn

from raydist.checkpoints.differences import (
    MISSING,
    UNEXPECTED,
    Difference,
    describe_differences,
    differences_of,
    refused,
)
from raydist.checkpoints.manifest import SavedCheckpoint
from raydist.checkpoints.object_state import aliases_of, kind_of_state, load_state, rejected_state, state_of
from raydist.checkpoints.tensor_file import TensorFile
from raydist.core.errors import InvalidArgumentError, RaydistError
from raydist.parameter_servers.sharded_embedding import SavedRows


@final
@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A restore that replicas take part in."""

    token: str  # unique id of the restore
    checkpoint: SavedCheckpoint  # the checkpoint, reduced to the objects of the replicas
    saved: Mapping[str, str]  # name in the checkpoint, by name of the object
    strict: bool  # require that all entries exist, and no others

    def files(self) -> dict[str, tuple[TensorFile, ...]]:
        """Return the tensor files by name of the object."""
        return {name: self.checkpoint.files(saved) for name, saved in self.saved.items()}


@final
@dataclass(frozen=True, slots=True)
class PreparedShard:
    """A replica's report before anything is changed."""

    # differences by name of the object, for all objects that are restored
    differences: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    # True if the replica could open its files. Otherwise (for example on another machine) the driver reads them.
    sees_files: bool = True


# First the kinds whose load_state_dict may raise. Modules were checked before and come last: their tensors are
# overwritten in place, while the other kinds replace tensors, so that the previous states can be restored.
_ORDER = ("other", "metric", "optimizer", "module")


def load_states(
    objects: Mapping[str, Any], states: Mapping[str, Any], modules: Mapping[str, nn.Module], strict: bool
) -> Callable[[], None]:
    """Load states into objects, by name; return a function that undoes this for all objects except modules.

    If an object rejects its state, the previous states are restored, and the error names the object.
    """
    kinds = {name: kind_of_state(objects[name]) for name in states}
    before = {name: state_of(objects[name], modules) for name, kind in kinds.items() if kind != "module"}
    loaded: list[str] = []

    def undo() -> None:
        for name in loaded:
            if name in before:
                load_state(objects[name], before[name], modules)

    for name in sorted(states, key=lambda name: _ORDER.index(kinds[name])):
        obj = objects[name]
        try:
            load_state(obj, states[name], modules, strict)
            loaded.append(name)
        except BaseException as error:
            undo()
            with contextlib.suppress(Exception):  # possibly changed in part; the original error counts
                if name in before:
                    load_state(obj, before[name], modules)
            if isinstance(error, RaydistError) or not isinstance(error, Exception):
                raise
            raise rejected_state(name, obj, error) from error
    return undo


class ShardRestorer(Protocol):
    """A strategy whose replicas, or servers, read the states that they hold.

    `prepare`, `commit` and `discard` block for dispatched steps and for their own end.
    """

    def holds(self, obj: Any) -> bool:
        """Return True if replicas hold an object, or can be sent it. Does not block."""

    def can_restore(self, obj: Any) -> bool:
        """Return True if replicas can restore an object that they hold, all alike and without the driver."""

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShard] | None:
        """Make replicas compare and read; return None if they cannot be sent the objects. Raise a replica's error.

        The first replica's report has all differences of the objects that replicas restore.
        """

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Make replicas change the objects. Raise an error only if no replica has changed any."""

    def discard(self) -> None:
        """Make replicas drop the values that they have read."""


@final
@dataclass(frozen=True, slots=True)
class ShardedRestore:
    """The part of one restore that replicas or servers perform."""

    restorer: ShardRestorer  # calls the replicas
    objects: Mapping[str, Any]  # objects that replicas restore
    modules: Mapping[str, nn.Module]  # modules that name the parameters of optimizers
    token: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique id of the restore

    @classmethod
    def of(
        cls,
        objects: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        checkpoint: SavedCheckpoint,
        restorers: Sequence[ShardRestorer],
    ) -> Self | None:
        """Return the part of a restore that replicas perform, or None."""
        if checkpoint.directory.only_here:
            return None
        kinds = {name: "rows" if isinstance(obj, SavedRows) else kind_of_state(obj) for name, obj in objects.items()}
        names = [name for name, kind in kinds.items() if kind in ("module", "optimizer", "rows")]
        restorer = next((each for each in restorers if any(each.holds(objects[name]) for name in names)), None)
        if restorer is None:
            return None
        naming = {name: module for name, module in modules.items() if next(module.parameters(), None) is not None}
        theirs = {name: module for name, module in naming.items() if restorer.holds(module)}
        remote = {
            name: objects[name]
            for name in names
            if restorer.holds(objects[name])
            and (kinds[name] != "optimizer" or len(theirs) == len(naming))  # needs the modules that name its parameters
            and restorer.can_restore(objects[name])
        }
        return cls(restorer, remote, theirs) if remote else None

    def prepare(
        self, checkpoint: SavedCheckpoint, saved: Mapping[str, str], strict: bool
    ) -> Mapping[str, Sequence[Difference]]:
        """Make replicas read and verify all values without changing objects. Blocks.

        Return the differences of the objects that replicas restore; {} if replicas cannot open the files or be sent the
        objects. `saved` has the names in the checkpoint, by name of the object.
        """
        theirs = {name: each for name, each in saved.items() if name in self.objects}
        if not theirs:
            return {}
        request = RestoreRequest(self.token, checkpoint.part(tuple(theirs.values())), theirs, strict)
        shards = self.restorer.prepare(request, {name: self.objects[name] for name in theirs}, self.modules)
        if shards is None:
            return {}
        if not all(shard.sees_files for shard in shards):
            self.restorer.discard()
            return {}
        return shards[0].differences

    def commit(self, names: Iterable[str]) -> None:
        """Change these objects. Nothing is changed if an error is raised."""
        self.restorer.commit(self.token, {name: self.objects[name] for name in names}, self.modules)


@final
@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The entries that were not restored, with `strict=False`.

    Attributes:
        missing: Entries of the objects that the checkpoint lacks; they stay unchanged.
        unexpected: Entries of the checkpoint that no object has.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def chosen_objects(objects: Mapping[str, Any], only: Sequence[str] | str | None) -> dict[str, Any]:
    """Return the objects to restore. Raise InvalidArgumentError for an unknown name.

    >>> list(chosen_objects({"model": 1, "more.a": 2, "more.b": 3}, ["more"]))
    ['more.a', 'more.b']
    """
    if only is None:
        return dict(objects)
    names = (only,) if isinstance(only, str) else tuple(only)
    for name in names:
        if not any(_is_or_in(each, name) for each in objects):
            raise InvalidArgumentError(
                f"`only` must name objects of the checkpoint, which are {', '.join(objects)}, got {name!r}."
            )
    return {each: obj for each, obj in objects.items() if any(_is_or_in(each, name) for name in names)}


def _is_or_in(name: str, asked: str) -> bool:
    return name == asked or name.startswith(f"{asked}.")


def restore_objects(
    objects: Mapping[str, Any],
    wanted: Mapping[str, Any],
    checkpoint: SavedCheckpoint,
    strict: bool,
    whole: bool,
    restorers: Sequence[ShardRestorer] = (),
) -> RestoreReport:
    """Restore saved states into the wanted ones of all objects.

    With `whole`, objects of the checkpoint that are not in `objects` are reported as unexpected.

    Raises:
        InvalidArgumentError: States do not fit; the message lists the entries. Nothing is changed.
        DataLossError: The checkpoint is damaged. Nothing is changed.
    """
    modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
    aliases = aliases_of(wanted)
    once = {name: obj for name, obj in wanted.items() if name not in aliases}
    names = {name: _saved_name(obj, objects, checkpoint) for name, obj in once.items()}
    saved = {name: each for name, each in names.items() if each is not None}
    remote = ShardedRestore.of(once, modules, checkpoint, restorers)
    prepared = {} if remote is None else remote.prepare(checkpoint, saved, strict)
    try:
        local = {name: each for name, each in saved.items() if name not in prepared}
        compared: dict[str, Sequence[Difference]] = {name: [Difference(MISSING, name)] for name in once}
        compared |= {name: differences_of(name, once[name], modules, checkpoint, each) for name, each in local.items()}
        compared |= prepared
        found = [each for several in compared.values() for each in several]
        if whole:
            found += [Difference(UNEXPECTED, name) for name in checkpoint.manifest.objects if name not in objects]
        _require_fit(found, checkpoint, strict)
        undo = load_states(once, {name: checkpoint.state(each) for name, each in local.items()}, modules, strict)
    except BaseException:
        if remote is not None and prepared:
            with contextlib.suppress(Exception):  # the user must see the original error
                remote.restorer.discard()
        raise
    if remote is not None and prepared:  # at last: replicas change all of their objects or none
        try:
            remote.commit(prepared)
        except BaseException:
            undo()
            raise
    return RestoreReport(
        tuple(each.entry for each in found if each.what == MISSING),
        tuple(each.entry for each in found if each.what == UNEXPECTED),
    )


def _saved_name(obj: Any, objects: Mapping[str, Any], checkpoint: SavedCheckpoint) -> str | None:
    """Return the name of an object under which the checkpoint has its state; None if there is none."""
    return next((each for each in objects if objects[each] is obj and each in checkpoint.manifest.objects), None)


def _require_fit(found: list[Difference], checkpoint: SavedCheckpoint, strict: bool) -> None:
    wrong = refused(found, strict)
    if wrong:
        hint = "Restore into objects like those that were saved"
        more = ", or give strict=False to leave what is missing or unexpected" if strict else ""
        raise InvalidArgumentError(
            f"The checkpoint {checkpoint.directory.shown!r} must have the entries of the objects, but "
            f"{describe_differences(wrong)}. {hint}{more}."
        )
