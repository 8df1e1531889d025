"""What of a saved state does not fit the object that is to take it. Pure; decides before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.nn.parameter import is_lazy

from raydist.checkpoints.dtypes import stored_dtype, torch_dtype
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.optimizer_names import GROUPS
from raydist.checkpoints.saved_kinds import SHARES
from raydist.checkpoints.tensor_file import FilePlace

__all__ = [
    "MISSING",
    "UNEXPECTED",
    "Difference",
    "in_words",
    "state_differences",
    "tensor_differences",
    "tensor_named",
]

MISSING, UNEXPECTED, RESHAPED, RETYPED = "missing", "unexpected", "reshaped", "retyped"
_MOST_SHOWN = 20


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """One entry.

    Attributes:
        what: "missing" in the checkpoint, "unexpected" there, "reshaped" or "retyped".
        entry: Its path, with the object's name.
        more: What is there, and what was saved.
    """

    what: str
    entry: str
    more: str = ""


def in_words(found: Iterable[Difference]) -> str:
    """For messages: at most 20 of them.

    >>> in_words([Difference("missing", "model.a"), Difference("reshaped", "model.b", "(2,) here, (3,) saved")])
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
    """What does not fit.

    Args:
        name: Of the object.
        here: Its state now, packed.
        tensors: Those of its state now.
        saved: The state that it is to take.
        places: Those of the tensors of that.
    """
    if (here.kind, here.class_name) != (saved.kind, saved.class_name):
        return [Difference(RETYPED, name, f"{_kind(here)} here, {_kind(saved)} saved")]
    if here.kind == "optimizer":
        common = [(key, tensors[key], place) for key, place in places.items() if key in tensors]
        return [*_groups(name, here.values, saved.values), *tensor_differences(name, common)]
    if not isinstance(here.values, dict) or not isinstance(saved.values, dict):
        return []
    if here.kind == "module":
        return [*_keys(name, here.values, saved.values), *_entries(name, here.values, tensors, saved.values, places)]
    if here.kind == "metric":  # what each replica holds belongs to a number of them
        return _keys(name, *([key for key in values if key != SHARES] for values in (here.values, saved.values)))
    if here.class_name:  # what begins with "_" is torch's, and changes with its version
        return _keys(
            name, *([key for key in values if not key.startswith("_")] for values in (here.values, saved.values))
        )
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
    """Of a module: what is a tensor must be one, of that shape and type."""
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
    """Which tensor a packed value is, if it is one.

    >>> tensor_named({"$tensor": "weight"}), tensor_named(3)
    ('weight', None)
    """
    found = value.get("$tensor") if isinstance(value, dict) and len(value) == 1 else None
    return None if found is None else str(found)


def tensor_differences(name: str, common: Iterable[tuple[str, Any, FilePlace]]) -> list[Difference]:
    """What does not fit of tensors that there are on both sides.

    Args:
        name: Of the object.
        common: Names, tensors (which need no values) and places.
    """
    found = []
    for key, tensor, place in common:
        if is_lazy(tensor):
            continue
        if tuple(tensor.shape) != place.shape:
            found.append(Difference(RESHAPED, f"{name}.{key}", f"{tuple(tensor.shape)} here, {place.shape} saved"))
        elif (dtype := torch_dtype(tensor)) != (saved_dtype := stored_dtype(place.dtype)):
            found.append(Difference(RETYPED, f"{name}.{key}", f"{dtype} here, {saved_dtype} saved"))
    return found
