"""Comparison of objects with their saved states, in the process that holds the objects' tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from raydist.checkpoints.differences import MISSING, UNEXPECTED, Difference, state_differences
from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.saved_kinds import class_of_state, kind_of_state, state_of

__all__ = ["differences_of", "refused"]


def differences_of(
    name: str, obj: Any, modules: Mapping[str, nn.Module], checkpoint: SavedCheckpoint, saved: str
) -> list[Difference]:
    """Return the differences between an object and a saved state.

    Args:
        name: Name of the object.
        obj: The object.
        modules: Modules that name the parameters of optimizers.
        checkpoint: The checkpoint that has the state.
        saved: Name of the state in the checkpoint.

    Raises:
        DataLossError: The saved entry is not a valid state.
    """
    packed = pack_state(state_of(obj, modules), name)
    here = SavedObject(kind_of_state(obj), class_of_state(obj), packed.values)
    there = checkpoint.saved(saved)
    try:
        return state_differences(name, here, packed.tensors, there, checkpoint.places(saved))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise checkpoint.loss(f"the state of {saved!r} is none: {error!r:.300}") from error


def refused(found: Iterable[Difference], strict: bool) -> list[Difference]:
    """Return the differences that prevent a restore.

    >>> refused([Difference("missing", "model.a"), Difference("reshaped", "model.b")], strict=False)
    [Difference(what='reshaped', entry='model.b', more='')]
    """
    return [each for each in found if strict or each.what not in (MISSING, UNEXPECTED)]
