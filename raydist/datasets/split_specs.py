"""Split specs such as "train[:80%]+test", in the language of TensorFlow Datasets.

Source: tfds.core.ReadInstruction; https://www.tensorflow.org/datasets/splits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raydist.core.errors import InvalidArgumentError

_PART = re.compile(
    r"(?P<split>[\w.-]+)"
    r"(?:\[(?P<start>-?\d[\d_]*)?(?P<start_unit>%)?(?P<colon>:)(?P<stop>-?\d[\d_]*)?(?P<stop_unit>%)?\])?"
    r"(?:\((?P<rounding>\w+)\))?"
)
_ROUNDINGS = ("closest", "pct1_dropremainder")
_HELP = (
    'Write, for example, "train", "train[:80%]", "train[10:20]", "train[-1000:]" or "train[10%:]+test"; "all" for '
    "all splits."
)


@dataclass(frozen=True, slots=True)
class SplitRange:
    """The examples `start` .. `stop` - 1 of a split."""

    split: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def parse_split(spec: str, names: Sequence[str], count: Callable[[str], int]) -> tuple[SplitRange, ...]:
    """Return the examples that a spec names, in order.

    Args:
        spec: The spec.
        names: Names of all splits.
        count: Returns the number of examples of a split.

    Raises:
        InvalidArgumentError: The spec is not in the language, names no split, or a boundary is outside of its split.

    >>> parse_split("train[25%:]+test", ["train", "test"], {"train": 10, "test": 3}.get)
    (SplitRange(split='train', start=2, stop=10), SplitRange(split='test', start=0, stop=3))
    """
    if not isinstance(spec, str):
        raise InvalidArgumentError(f"A split must be a str, or a list or dict of them, got {spec!r:.100}. {_HELP}")
    if spec.strip() == "all":
        return tuple(SplitRange(name, 0, count(name)) for name in names)
    return tuple(_parse_part(part.strip(), spec, names, count) for part in spec.split("+"))


def _parse_part(part: str, spec: str, names: Sequence[str], count: Callable[[str], int]) -> SplitRange:
    found = _PART.fullmatch(part)
    if found is None or (found["start_unit"] and not found["start"]) or (found["stop_unit"] and not found["stop"]):
        raise InvalidArgumentError(f"A split must be a name or a slice of it, got {part!r} in {spec!r}. {_HELP}")
    name = found["split"]
    if name not in names:
        raise InvalidArgumentError(
            f"A split must be one of {', '.join(map(repr, names))}, got {name!r}. Use one of these, or a slice of it."
        )
    if (found["rounding"] or "closest") not in _ROUNDINGS:
        raise InvalidArgumentError(f"Percents must be rounded by one of {_ROUNDINGS}, got {found['rounding']!r}.")
    units = {unit or "" for text, unit in _boundaries(found) if text}
    if len(units) > 1:
        raise InvalidArgumentError(
            f"Both boundaries of a slice must be percents, or both numbers of examples, got {part!r}. Write two slices "
            "and add them, or convert one boundary."
        )
    size = count(name)
    start, stop = (_absolute(text, unit, size, part, found["rounding"]) for text, unit in _boundaries(found))
    first, end = start or 0, size if stop is None else stop
    return SplitRange(name, first, max(first, end))


def _boundaries(found: re.Match[str]) -> tuple[tuple[str | None, str | None], ...]:
    return (found["start"], found["start_unit"]), (found["stop"], found["stop_unit"])


def _absolute(text: str | None, unit: str | None, size: int, part: str, rounding: str | None) -> int | None:
    """Return a boundary as a number in 0 .. `size`; None if it is left out."""
    if text is None:
        return None
    number = int(text)
    if unit:
        number = _of_percents(number, size, part, rounding)
    if abs(number) > size:
        raise InvalidArgumentError(
            f"The boundaries of a slice must lie within the split's {size} examples, got {part!r}. Use percents, or "
            "leave the boundary out for the end of the split."
        )
    return number + size if number < 0 else number


def _of_percents(percents: int, size: int, part: str, rounding: str | None) -> int:
    if abs(percents) > 100:
        raise InvalidArgumentError(f"Percents must be in -100 .. 100, got {part!r}.")
    if rounding == "pct1_dropremainder":
        if size < 100:
            raise InvalidArgumentError(
                f"pct1_dropremainder needs a split of at least 100 examples, got {part!r} of {size}: 1 % would be "
                "nothing. Leave the rounding out."
            )
        return percents * (size // 100)
    return round(percents * size / 100.0)  # as TensorFlow Datasets: halves go to the even number
