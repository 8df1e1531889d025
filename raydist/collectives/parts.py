"""The tensors of a collective that takes several: whether they fit, and of different lengths where only one will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from raydist.collectives.base import FinishingWork, Membership, Work
from raydist.errors import InvalidArgumentError

__all__ = ["check_parts", "check_rank", "check_rows", "check_swapped", "describe_tensor", "gather_padded", "rows_name"]


def describe_tensor(tensor: torch.Tensor) -> str:
    """The dtype and shape.

    >>> describe_tensor(torch.ones(2, 3))
    'torch.float32 (2, 3)'
    """
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def check_parts(name: str, parts: Sequence[torch.Tensor], one: torch.Tensor, world_size: int) -> None:
    """Raise InvalidArgumentError unless `parts` are one tensor a rank, each like `one`.

    A part that is too short would be written past its end.
    """
    wrong = [describe_tensor(part) for part in parts if part.dtype != one.dtype or part.shape != one.shape]
    if wrong or len(parts) != world_size:
        raise InvalidArgumentError(
            f"{name} needs {world_size} tensors of {describe_tensor(one)}, one a rank, got {len(parts)}"
            f"{f', of which one is {wrong[0]}' if wrong else ''}."
        )


def check_rank(role: str, rank: int, membership: Membership) -> None:
    """Raise InvalidArgumentError unless the group has a rank of this number.

    >>> check_rank("root", 2, Membership("g", 0, rank=0, world_size=2))
    Traceback (most recent call last):
    raydist.errors.InvalidArgumentError: The root must be a rank of group 'g', 0 to 1, got 2.
    """
    if not 0 <= rank < membership.world_size:
        raise InvalidArgumentError(
            f"The {role} must be a rank of group {membership.group!r}, 0 to {membership.world_size - 1}, got {rank}."
        )


def check_swapped(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], world_size: int) -> None:
    """Raise InvalidArgumentError unless both are one tensor a rank, all alike."""
    one = inputs[0] if inputs else torch.empty(0)
    check_parts("all_to_all", inputs, one, world_size)
    check_parts("all_to_all", outputs, one, world_size)


def check_rows(outputs: Sequence[torch.Tensor], mine: torch.Tensor, rank: int, world_size: int) -> None:
    """Raise InvalidArgumentError unless `outputs` are one tensor a rank, like `mine` but for their lengths.

    >>> check_rows([torch.ones(2, 3), torch.ones(1, 4)], torch.ones(2, 3), rank=0, world_size=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raydist.errors.InvalidArgumentError: all_gather_rows needs 2 tensors of torch.float32 (any, 3), ... got ...
    """
    fits = len(outputs) == world_size and mine.dim() > 0 and outputs[rank].shape == mine.shape
    if not fits or any(
        output.dtype != mine.dtype or output.dim() == 0 or output.shape[1:] != mine.shape[1:] for output in outputs
    ):
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        wanted = ", ".join(("any", *map(str, mine.shape[1:])))
        raise InvalidArgumentError(
            f"all_gather_rows needs {world_size} tensors of {mine.dtype} ({wanted}), one a rank and this rank's of "
            f"length {len(mine) if mine.dim() else 'one'}, got {shapes}."
        )


def rows_name(outputs: Sequence[torch.Tensor]) -> str:
    """What the call is called: ranks that know other lengths call another one.

    >>> rows_name([torch.ones(2, 3), torch.ones(0, 3)])
    'all_gather_rows(2, 0)'
    """
    return f"all_gather_rows({', '.join(str(len(output)) for output in outputs)})"


def gather_padded(
    outputs: Sequence[torch.Tensor],
    mine: torch.Tensor,
    all_gather: Callable[[list[torch.Tensor], torch.Tensor], Work],
) -> Work:
    """Gather tensors as long as the longest, of which each rank keeps what is meant."""
    longest = max(len(output) for output in outputs)
    padded = mine.detach().new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine.detach()
    parts = [torch.empty_like(padded) for _ in outputs]

    def cut() -> None:
        for output, part in zip(outputs, parts, strict=True):
            output.detach().copy_(part[: len(output)])

    return FinishingWork(all_gather(parts, padded).wait, cut)
