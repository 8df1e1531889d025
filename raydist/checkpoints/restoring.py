"""Giving saved states to objects: everything is read and compared before anything is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from raydist.checkpoints.differences import MISSING, UNEXPECTED, Difference, in_words, state_differences
from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.named_objects import other_names
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.saved_kinds import class_of_state, give_state, kind_of_state, state_of
from raydist.errors import InvalidArgumentError, RaydistError

__all__ = ["RestoreReport", "chosen_objects", "restore_objects"]

# Those first that may yet refuse a state. What fits a module is known before; its tensors are overwritten in place,
# while those of all others are replaced, so that theirs of before can be given back.
_ORDER = ("other", "metric", "optimizer", "module")


@final
@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What was not restored, with `strict=False`.

    Attributes:
        missing: Entries that objects have and the checkpoint has not: they stay as they were.
        unexpected: Entries that the checkpoint has and no object.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def chosen_objects(objects: Mapping[str, Any], only: Sequence[str] | str | None) -> dict[str, Any]:
    """Those that are to be restored.

    >>> list(chosen_objects({"model": 1, "more.a": 2, "more.b": 3}, ["more"]))
    ['more.a', 'more.b']

    Raises:
        InvalidArgumentError: A name is unknown.
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
) -> RestoreReport:
    """Give objects their states.

    Args:
        objects: All of them.
        wanted: Those that are to be restored.
        checkpoint: The one that has the states.
        strict: Whether all entries must be there, and no others.
        whole: Whether objects that the checkpoint has beside them are unexpected.

    Raises:
        InvalidArgumentError: States do not fit; lists the entries. Nothing is changed.
        DataLossError: The checkpoint is damaged. Nothing is changed.
    """
    modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
    found = _Restored(wanted, modules, checkpoint, whole)
    report = found.report(objects, strict)
    found.give(strict)
    return report


@final
class _Restored:
    """Objects, and the states that are for them."""

    def __init__(
        self, wanted: Mapping[str, Any], modules: dict[str, nn.Module], checkpoint: SavedCheckpoint, whole: bool
    ) -> None:
        again = other_names(wanted)
        self._objects = {name: obj for name, obj in wanted.items() if name not in again}
        self._modules = modules
        self._checkpoint = checkpoint
        self._whole = whole
        self._states: dict[str, Any] = {}
        self._before: dict[str, Any] = {}

    def _saved_name(self, name: str, wanted: Mapping[str, Any]) -> str | None:
        """Under which of its names the checkpoint has an object."""
        obj = wanted[name]
        return next(
            (each for each in wanted if wanted[each] is obj and each in self._checkpoint.manifest.objects), None
        )

    def report(self, objects: Mapping[str, Any], strict: bool) -> RestoreReport:
        """Compare all, and read all."""
        found: list[Difference] = []
        known: dict[str, str] = {}
        for name, obj in self._objects.items():
            saved = self._saved_name(name, objects)
            if saved is None:
                found.append(Difference(MISSING, name))
                continue
            known[name] = saved
            found += self._compared(name, obj, saved)
        if self._whole:
            found += [Difference(UNEXPECTED, name) for name in self._checkpoint.manifest.objects if name not in objects]
        self._require_fit(found, strict)
        self._states = {name: self._checkpoint.state(saved) for name, saved in known.items()}
        return RestoreReport(
            tuple(each.entry for each in found if each.what == MISSING),
            tuple(each.entry for each in found if each.what == UNEXPECTED),
        )

    def _compared(self, name: str, obj: Any, saved: str) -> list[Difference]:
        kind = kind_of_state(obj)
        state = state_of(obj, self._modules)
        if kind != "module":
            self._before[name] = state
        packed = pack_state(state, name)
        here = SavedObject(kind, class_of_state(obj), packed.values)
        there = self._checkpoint.saved(saved)
        try:
            return state_differences(name, here, packed.tensors, there, self._checkpoint.places(saved))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._checkpoint.loss(f"the state of {saved!r} is none: {error!r:.300}") from error

    def _require_fit(self, found: list[Difference], strict: bool) -> None:
        wrong = found if strict else [each for each in found if each.what not in (MISSING, UNEXPECTED)]
        if wrong:
            hint = "Restore into objects like those that were saved"
            more = ", or give strict=False to leave what is missing or unexpected" if strict else ""
            raise InvalidArgumentError(
                f"The checkpoint {self._checkpoint.directory.shown!r} must have the entries of the objects, but "
                f"{in_words(wrong)}. {hint}{more}."
            )

    def give(self, strict: bool) -> None:
        """Change the objects. Where one refuses its state, those that were changed before get theirs back."""
        given: list[str] = []
        order = sorted(self._states, key=lambda name: _ORDER.index(kind_of_state(self._objects[name])))
        for name in order:
            obj = self._objects[name]
            try:
                give_state(obj, self._states[name], self._modules, strict)
                given.append(name)
            except BaseException as error:
                self._give_back(given)
                with contextlib.suppress(Exception):  # it may have taken a part; its own error is what must be seen
                    self._give_back([name])
                if isinstance(error, RaydistError) or not isinstance(error, Exception):
                    raise
                raise InvalidArgumentError(
                    f"The saved state of {name!r} must be one that a {type(obj).__name__} takes, but load_state_dict "
                    f"says: {error!s:.500} ({type(error).__name__}). Restore into one like that which was saved."
                ) from error

    def _give_back(self, given: list[str]) -> None:
        for name in given:
            if name in self._before:
                give_state(self._objects[name], self._before[name], self._modules)
