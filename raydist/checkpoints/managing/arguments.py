"""What a manager must be given. Pure."""

from __future__ import annotations

from typing import Any

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.errors import InvalidArgumentError
from raydist.pipelines.stored.file_directory import is_file_name

__all__ = ["require_arguments"]

_LARGEST_NUMBER = (1 << 63) - 1  # of a checkpoint: 19 digits behind its name


def require_arguments(checkpoint: Any, checkpoint_name: Any, init_fn: Any, exit_code: Any) -> None:
    """InvalidArgumentError unless `CheckpointManager` can be meant so."""
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidArgumentError(f"checkpoint must be an rd.Checkpoint, got {type(checkpoint).__name__}.")
    if not is_file_name(f"{checkpoint_name}-{_LARGEST_NUMBER}"):
        raise InvalidArgumentError(
            f"checkpoint_name must consist of letters, digits, '.', '_' and '-', at most 180 of them, got "
            f"{checkpoint_name!r:.100}."
        )
    if not (init_fn is None or callable(init_fn)):
        raise InvalidArgumentError(f"init_fn must be a function without arguments, or None, got {init_fn!r:.80}.")
    if not (type(exit_code) is int and 0 <= exit_code <= 255):
        raise InvalidArgumentError(f"exit_code must be a number from 0 to 255, got {exit_code!r:.50}.")
