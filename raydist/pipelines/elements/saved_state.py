"""Checks of the states of iterators that a user loads.

A state contains only dicts, lists, text, bools, None and counts. `require_state` checks this once, before use.
`state_errors` turns the error of an operation that cannot use its part into an InvalidArgumentError.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raydist.core.errors import InvalidArgumentError, RaydistError
from raydist.pipelines.elements.items import IteratorState

_MAX_COUNT = (1 << 63) - 1
_MAX_DEPTH = 4000  # of consecutive operations; each makes a state two levels deeper
_SIGNED = {"seed", "orders"}  # numbers in these parts may be negative
_LEFT = "left"  # of take and skip: -1 means all
_PACKAGE = str(Path(__file__).parents[2])

_Path = tuple[str | int, ...]


def require_state(state: Any) -> IteratorState:
    """Return `state` after a check of its types and numbers.

    >>> require_state({"at": {"next": 3}, "skip": 0})
    {'at': {'next': 3}, 'skip': 0}

    Raises:
        InvalidArgumentError: The object cannot be a state. The message names the part.
    """
    if not isinstance(state, dict):
        raise _wrong((), f"must be a dict, got {state!r:.100}")
    open_parts: list[tuple[_Path, Any]] = [((), state)]
    while open_parts:
        path, part = open_parts.pop()
        if isinstance(part, dict | list | tuple):
            open_parts += _entries(path, part)
        elif isinstance(part, int) and not isinstance(part, bool):
            least = -_MAX_COUNT if not _SIGNED.isdisjoint(path[:3]) else -1 if path[-1] == _LEFT else 0
            if not least <= part <= _MAX_COUNT:
                raise _wrong(path, f"must be from {least} to {_MAX_COUNT}, got a number of {part.bit_length()} bits")
        elif not isinstance(part, str | bool | None):
            raise _wrong(path, f"must be a dict, a list, text, an int, a bool or None, got {part!r:.100}")
    return state


def require_pipelines(state: IteratorState, num_pipelines: int) -> None:
    """Raise InvalidArgumentError unless `state` has a part for each of `num_pipelines` input pipelines.

    >>> require_pipelines({"inputs": [{}, {}]}, 2)
    """
    parts = state.get("inputs", [state])
    if not isinstance(parts, list):
        raise _wrong(("inputs",), f"must be a list, got {parts!r:.100}")
    if len(parts) != num_pipelines:
        raise InvalidArgumentError(
            f"A state of several input pipelines belongs to as many of them, but it is of {len(parts)}, and there are "
            f"{num_pipelines} now. Resume with the number of pipelines that it was saved with."
        )


def require_settings(state: IteratorState, settings: Mapping[str, str]) -> None:
    """Raise InvalidArgumentError unless a state has these settings of operations, or none for an operation.

    >>> require_settings({"settings": {"shuffle-1": "seed=3"}}, {"shuffle-1": "seed=3"})
    """
    saved = state.get("settings", {})
    if not isinstance(saved, dict):
        raise _wrong(("settings",), f"must be a dict, got {saved!r:.100}")
    for name, here in settings.items():
        if saved.get(name, here) != here:
            raise InvalidArgumentError(
                f"A state must be loaded with the settings that it was saved with, else elements would be missed or "
                f"come twice, but {name} had {saved[name]!s:.200} and has {here} now. Set them as they were, or begin "
                "anew."
            )


def counts_in(values: Any, length: int) -> tuple[int, ...]:
    """Return `values`, which must be `length` numbers; raises ValueError otherwise.

    >>> counts_in([3, 4], 2)
    (3, 4)
    """
    return _all_of(values, int, length)


def texts_in(values: Any, length: int) -> tuple[str, ...]:
    """Return `values`, which must be `length` texts; raises ValueError otherwise.

    >>> texts_in(["a"], 1)
    ('a',)
    """
    return _all_of(values, str, length)


def seeds_in(saved: Any, here: Mapping[str, int]) -> dict[str, int]:
    """Return the seeds of operations from the state, and those in `here` that the state lacks.

    >>> seeds_in({"shuffle-1": 3}, {"shuffle-1": 5, "shuffle-2": 6})
    {'shuffle-1': 3, 'shuffle-2': 6}
    """
    return {name: int(saved.get(name, seed)) for name, seed in here.items()}


def _all_of(values: Any, kind: type, length: int) -> tuple[Any, ...]:
    if isinstance(values, list | tuple) and len(values) == length and all(isinstance(one, kind) for one in values):
        return tuple(values)
    raise ValueError(f"{length} values of type {kind.__name__} must be there, got {values!r:.100}")


def _entries(path: _Path, part: Any) -> list[tuple[_Path, Any]]:
    if len(path) > _MAX_DEPTH:
        raise _wrong(path[:3], f"must not be nested more than {_MAX_DEPTH} deep")
    if not isinstance(part, dict):
        return [((*path, number), entry) for number, entry in enumerate(part)]
    odd = next((key for key in part if not isinstance(key, str)), None)
    if odd is not None:
        raise _wrong(path, f"must have keys of text, got {odd!r:.100}")
    return [((*path, key), entry) for key, entry in part.items()]


@contextmanager
def state_errors() -> Iterator[None]:
    """Turn errors that raydist's own code raises on an unreadable state into an InvalidArgumentError.

    Errors of a user's functions, which loading may call again, stay unchanged.
    """
    try:
        yield
    except RaydistError:
        raise
    except (Exception, StopIteration) as error:
        _, *frames = traceback.walk_tb(error.__traceback__)
        if any(not frame.f_code.co_filename.startswith(_PACKAGE) for frame, _ in frames):
            raise
        raise _wrong((), _problem(error)) from error


def _problem(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"must have an entry {error.args[0]!r:.100}"
    if isinstance(error, StopIteration):
        return "must be of the data that is read, which ends before it"
    return f"cannot be read ({type(error).__name__}: {error!s:.200})"


def _wrong(path: _Path, problem: str) -> InvalidArgumentError:
    where = "the state" if not path else f"the state's part {''.join(f'[{key!r}]' for key in path):.300}"
    return InvalidArgumentError(
        f"A state must be what state_dict() gave, but {where} {problem}. Use one as it was saved, or begin anew."
    )
