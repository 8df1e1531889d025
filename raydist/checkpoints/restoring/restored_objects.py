"""Restore saved states into objects: everything is read and compared before any object changes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from raydist.checkpoints.differences import MISSING, UNEXPECTED, Difference, in_words
from raydist.checkpoints.named_objects import other_names
from raydist.checkpoints.restoring.compared_objects import differences_of, refused
from raydist.checkpoints.restoring.given_states import GivenStates
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.sharing.shared_restore import SharedRestore, ShareRestorer, shared_restore
from raydist.errors import InvalidArgumentError

__all__ = ["RestoreReport", "chosen_objects", "restore_objects"]


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
    """Return the objects to restore.

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
    restorers: Sequence[ShareRestorer] = (),
) -> RestoreReport:
    """Restore saved states into objects.

    Args:
        objects: All objects.
        wanted: The objects to restore.
        checkpoint: The checkpoint.
        strict: Require that all entries exist, and no others.
        whole: Report objects of the checkpoint that are not in `objects` as unexpected.
        restorers: Restorers of strategies that may hold objects.

    Raises:
        InvalidArgumentError: States do not fit; the message lists the entries. Nothing is changed.
        DataLossError: The checkpoint is damaged. Nothing is changed.
    """
    modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
    again = other_names(wanted)
    once = {name: obj for name, obj in wanted.items() if name not in again}
    shared = shared_restore(once, modules, checkpoint, restorers)
    found = _Restored(once, modules, checkpoint, strict, shared)
    try:
        report = found.report(objects, whole)
        found.give()
    except BaseException:
        found.discard()
        raise
    return report


@final
class _Restored:
    """Objects, and the states read for them."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        checkpoint: SavedCheckpoint,
        strict: bool,
        shared: SharedRestore | None,
    ) -> None:
        self._objects = objects
        self._modules = modules
        self._checkpoint = checkpoint
        self._strict = strict
        self._shared = shared
        self._prepared: dict[str, list[Difference]] = {}  # by replicas or servers
        self._states: dict[str, Any] = {}

    def report(self, objects: Mapping[str, Any], whole: bool) -> RestoreReport:
        """Compare all objects, and read all states."""
        names = {name: self._saved_name(obj, objects) for name, obj in self._objects.items()}
        saved = {name: each for name, each in names.items() if each is not None}
        self._prepare(saved)
        found: list[Difference] = []
        for name in self._objects:
            found += self._compared(name, saved[name]) if name in saved else [Difference(MISSING, name)]
        if whole:
            found += [Difference(UNEXPECTED, name) for name in self._checkpoint.manifest.objects if name not in objects]
        self._require_fit(found)
        self._states = {name: self._checkpoint.state(saved[name]) for name in saved if name not in self._prepared}
        return RestoreReport(
            tuple(each.entry for each in found if each.what == MISSING),
            tuple(each.entry for each in found if each.what == UNEXPECTED),
        )

    def _saved_name(self, obj: Any, objects: Mapping[str, Any]) -> str | None:
        """Return the name of an object under which the checkpoint has its state; None if there is none."""
        return next(
            (each for each in objects if objects[each] is obj and each in self._checkpoint.manifest.objects), None
        )

    def _prepare(self, saved: Mapping[str, str]) -> None:
        remote = {} if self._shared is None else {name: saved[name] for name in self._shared.objects if name in saved}
        if self._shared is None or not remote:
            return
        self._prepared = self._shared.prepare(self._checkpoint, remote, self._strict) or {}

    def _compared(self, name: str, saved: str) -> list[Difference]:
        if name in self._prepared:
            return self._prepared[name]
        return differences_of(name, self._objects[name], self._modules, self._checkpoint, saved)

    def _require_fit(self, found: list[Difference]) -> None:
        wrong = refused(found, self._strict)
        if wrong:
            hint = "Restore into objects like those that were saved"
            more = ", or give strict=False to leave what is missing or unexpected" if self._strict else ""
            raise InvalidArgumentError(
                f"The checkpoint {self._checkpoint.directory.shown!r} must have the entries of the objects, but "
                f"{in_words(wrong)}. {hint}{more}."
            )

    def give(self) -> None:
        """Change the objects; those of replicas last, because replicas change all of theirs or none."""
        given = GivenStates(self._objects, self._modules, self._strict)
        given.give(self._states)
        if self._shared is None or not self._prepared:
            return
        names, self._prepared = tuple(self._prepared), {}
        try:
            self._shared.commit(names)
        except BaseException:
            given.give_back()
            raise

    def discard(self) -> None:
        """Make replicas drop the states that they have read."""
        if self._shared is not None and self._prepared:
            with contextlib.suppress(Exception):  # the user must see the original error
                self._shared.discard()
