"""Restore saved states into objects: everything is read and compared before any object changes.

Replicas or parameter servers restore the objects that they hold: they read and verify first, and change objects at
the end.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, final

from torch import nn
from torch.nn.parameter import is_lazy

from raydist.checkpoints.entries import pack_state, stored_dtype, torch_dtype
from raydist.checkpoints.manifest import SavedCheckpoint, SavedObject
from raydist.checkpoints.object_state import (
    STATES_BY_RANK,
    aliases_of,
    class_of_state,
    kind_of_state,
    load_state,
    rejected_state,
    state_of,
)
from raydist.checkpoints.parameter_names import GROUPS
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.core.errors import InvalidArgumentError, RaydistError
from raydist.parameter_servers.sharded_embedding import SavedRows

MISSING, UNEXPECTED, RESHAPED, RETYPED = "missing", "unexpected", "reshaped", "retyped"

_MOST_SHOWN = 20


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that differs."""

    what: str  # "missing" or "unexpected" in the checkpoint, "reshaped" or "retyped"
    entry: str  # path of the entry, beginning with the object's name
    more: str = ""  # description of the current and of the saved entry


def describe_differences(found: Iterable[Difference]) -> str:
    """Describe at most 20 differences in a message.

    >>> missing, reshaped = Difference("missing", "model.a"), Difference("reshaped", "model.b", "(2,) here, (3,) saved")
    >>> describe_differences([missing, reshaped])
    "'model.a' is missing, 'model.b' is reshaped ((2,) here, (3,) saved)"
    """
    told = [f"{each.entry!r} is {each.what}{f' ({each.more})' if each.more else ''}" for each in found]
    more = len(told) - _MOST_SHOWN
    return ", ".join(told[:_MOST_SHOWN]) + (f", and {more} more" if more > 0 else "")


def state_differences(
    name: str,
    here: SavedObject,
    tensors: Mapping[str, Any],
    saved: SavedObject,
    places: Mapping[str, FilePlace],
) -> list[Difference]:
    """Return the differences between one object's current state, with its tensors, and its saved state."""
    if (here.kind, here.class_name) != (saved.kind, saved.class_name):
        return [Difference(RETYPED, name, f"{_kind(here)} here, {_kind(saved)} saved")]
    if here.kind == "optimizer":
        common = [(key, tensors[key], place) for key, place in places.items() if key in tensors]
        return [*_groups(name, here.values, saved.values), *tensor_differences(name, common)]
    if not isinstance(here.values, dict) or not isinstance(saved.values, dict):
        return []
    if here.kind == "module":
        return [*_keys(name, here.values, saved.values), *_entries(name, here.values, tensors, saved.values, places)]
    both = here.values, saved.values
    if here.kind == "metric":  # the number of replicas may differ
        return _keys(name, *([key for key in values if key != STATES_BY_RANK] for values in both))
    if here.class_name:  # entries that begin with "_" are torch's, and change with its version
        return _keys(name, *([key for key in values if not key.startswith("_")] for values in both))
    return []


def _kind(saved: SavedObject) -> str:
    return f"{saved.kind} {saved.class_name}" if saved.class_name else saved.kind


def _keys(name: str, here: Iterable[str], saved: Iterable[str]) -> list[Difference]:
    ours, theirs = dict.fromkeys(here), dict.fromkeys(saved)
    missing = [Difference(MISSING, f"{name}.{key}") for key in ours if key not in theirs]
    return missing + [Difference(UNEXPECTED, f"{name}.{key}") for key in theirs if key not in ours]


def _groups(name: str, here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Difference]:
    ours, theirs = (
        {parameter: number for number, group in enumerate(entries[GROUPS]) for parameter in group["params"]}
        for entries in (here, saved)
    )
    found = _keys(name, ours, theirs)
    moved = [key for key in ours if key in theirs and ours[key] != theirs[key]]
    return found + [
        Difference(RETYPED, f"{name}.{key}", f"in group {ours[key]} here, in group {theirs[key]} saved")
        for key in moved
    ]


def _entries(
    name: str,
    here: Mapping[str, Any],
    tensors: Mapping[str, Any],
    saved: Mapping[str, Any],
    places: Mapping[str, FilePlace],
) -> list[Difference]:
    found = []
    common = []
    for key in here:
        if key in saved:
            ours, theirs = tensor_named(here[key]), tensor_named(saved[key])
            if (ours is None) != (theirs is None):
                more = "no tensor here, one saved" if ours is None else "a tensor here, none saved"
                found.append(Difference(RETYPED, f"{name}.{key}", more))
            elif ours is not None and theirs is not None:
                common.append((key, tensors[ours], places[theirs]))
    return [*found, *tensor_differences(name, common)]


def tensor_named(value: Any) -> str | None:
    """Return the name of the tensor that a packed value refers to, or None."""
    found = value.get("$tensor") if isinstance(value, dict) and len(value) == 1 else None
    return None if found is None else str(found)


def tensor_differences(name: str, common: Iterable[tuple[str, Any, FilePlace]]) -> list[Difference]:
    """Return the differences of tensors on both sides, given their names, tensors (meta is enough) and locations."""
    found = []
    for key, tensor, place in common:
        if is_lazy(tensor):
            continue
        if tuple(tensor.shape) != place.shape:
            found.append(Difference(RESHAPED, f"{name}.{key}", f"{tuple(tensor.shape)} here, {place.shape} saved"))
        elif (dtype := torch_dtype(tensor)) != (saved_dtype := stored_dtype(place.dtype)):
            found.append(Difference(RETYPED, f"{name}.{key}", f"{dtype} here, {saved_dtype} saved"))
    return found


def differences_of(
    name: str, obj: Any, modules: Mapping[str, nn.Module], checkpoint: SavedCheckpoint, saved: str
) -> list[Difference]:
    """Return the differences between an object and a saved state. Raise DataLossError if that is not a state."""
    packed = pack_state(state_of(obj, modules), name)
    here = SavedObject(kind_of_state(obj), class_of_state(obj), packed.values)
    there = checkpoint.saved(saved)
    try:
        return state_differences(name, here, packed.tensors, there, checkpoint.places(saved))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise checkpoint.loss(f"the state of {saved!r} is invalid: {error!r:.300}") from error


def refused(found: Iterable[Difference], strict: bool) -> list[Difference]:
    """Return the differences that prevent a restore."""
    return [each for each in found if strict or each.what not in (MISSING, UNEXPECTED)]


@final
@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A restore that replicas take part in."""

    token: str  # unique id of the restore
    checkpoint: SavedCheckpoint  # the checkpoint, reduced to the objects of the replicas
    saved: Mapping[str, str]  # name in the checkpoint, by name of the object
    strict: bool  # require that all entries exist, and no others

    def files(self, without: Collection[str] = ()) -> dict[str, tuple[TensorFile, ...]]:
        """Return the tensor files by name of the object, `without` those of some objects."""
        return {name: self.checkpoint.files(saved) for name, saved in self.saved.items() if name not in without}


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
    names = {name: saved_name(obj, objects, checkpoint) for name, obj in once.items()}
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


def saved_name(obj: Any, objects: Mapping[str, Any], checkpoint: SavedCheckpoint) -> str | None:
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
