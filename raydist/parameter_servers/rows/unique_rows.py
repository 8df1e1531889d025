"""The rows that a step needs, each once, and their positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from raydist.errors import InvalidArgumentError

__all__ = ["UniqueRows"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@final
@dataclass(frozen=True, slots=True)
class UniqueRows:
    """The different rows among some numbers.

    Attributes:
        rows: Row numbers, rising, on the CPU; without the padding.
        places: For each number, on its device, its position in `rows`. The padding's position is `len(rows)`.
        padded: True if the padding is among the numbers.
    """

    rows: torch.Tensor
    places: torch.Tensor
    padded: bool

    @staticmethod
    def of(numbers: torch.Tensor, num_rows: int, padding: int | None = None) -> UniqueRows:
        """Find the different rows.

        Args:
            numbers: Row numbers.
            num_rows: Number of rows; all numbers must be below it.
            padding: A number that stands for no row.

        Raises:
            InvalidArgumentError: The numbers are no integers, or out of range.

        >>> found = UniqueRows.of(torch.tensor([[7, 3], [3, 0]]), 10, padding=0)
        >>> found.rows.tolist(), found.places.tolist()
        ([3, 7], [[1, 0], [0, 2]])
        """
        if numbers.dtype not in _INTEGERS:
            raise InvalidArgumentError(
                f"Rows of an embedding must be given as integers, got {numbers.dtype}. Cast them: .long()."
            )
        unique, places = torch.unique(numbers.long(), return_inverse=True)
        rows = unique.cpu()
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= num_rows):
            raise _out_of_range(numbers, num_rows)
        at = len(rows) if padding is None else int(torch.searchsorted(rows, padding))
        if at == len(rows) or int(rows[at]) != padding:
            return UniqueRows(rows, places, padded=False)
        behind = len(rows) - 1
        places = torch.where(places == at, behind, places - (places > at).long())
        return UniqueRows(torch.cat([rows[:at], rows[at + 1 :]]), places, padded=True)


def _out_of_range(numbers: torch.Tensor, num_rows: int) -> InvalidArgumentError:
    where = tuple(torch.nonzero((numbers < 0) | (numbers >= num_rows))[0].tolist())
    return InvalidArgumentError(
        f"Rows of an embedding must be between 0 and {num_rows - 1} (num_embeddings={num_rows}), got "
        f"{int(numbers[where])} at {list(where)}. Look for what made the number, or make the embedding larger."
    )
