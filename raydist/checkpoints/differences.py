"""Differences between a saved state and the object that will take it, computed before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.nn.parameter import is_lazy

from raydist.checkpoints.entries import pack_state, stored_dtype, torch_dtype
from raydist.checkpoints.manifest import SavedCheckpoint, SavedObject
from raydist.checkpoints.object_state import STATES_BY_RANK, class_of_state, kind_of_state, state_of
from raydist.checkpoints.parameter_names import GROUPS
from raydist.checkpoints.tensor_file import FilePlace

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
