"""States of iterators that come from outside: what is no state is an error that says where, not one of Python's.

A state has nothing but dicts, lists, text, truth values and counts. That is checked in one place, before it is used.
What an operation then misses, or cannot make sense of, is found by the part that it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raydist.errors import InvalidArgumentError, RaydistError
from raydist.pipelines.elements.items import IteratorState

__all__ = [
    "counts_in",
    "require_pipelines",
    "require_settings",
    "require_state",
    "seeds_in",
    "state_errors",
    "texts_in",
]

_MAX_COUNT = (1 << 63) - 1
_MAX_DEPTH = 4000  # of operations behind each other; a state is two deeper with each
_SIGNED = {"seed", "orders"}  # numbers in these parts may be negative
_LEFT = "left"  # of take and skip: -1 is all
_PACKAGE = str(Path(__file__).parents[2])

_Path = tuple[str | int, ...]


def require_state(state: Any) -> IteratorState:
    """`state`, which may be anything.

    >>> require_state({"at": {"next": 3}, "skip": 0})
    {'at': {'next': 3}, 'skip': 0}

    Raises:
        InvalidArgumentError: It cannot be one. Says where.
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
    """InvalidArgumentError unless `state` is of so many input pipelines: each has a part of it.

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
    """InvalidArgumentError unless a state was saved with these settings of operations. Those it knows nothing of do.

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
    """`values`, which must be so many numbers; ValueError otherwise.

    >>> counts_in([3, 4], 2)
    (3, 4)
    """
    return _all_of(values, int, length)


def texts_in(values: Any, length: int) -> tuple[str, ...]:
    """`values`, which must be so many texts; ValueError otherwise.

    >>> texts_in(["a"], 1)
    ('a',)
    """
    return _all_of(values, str, length)


def seeds_in(saved: Any, here: Mapping[str, int]) -> dict[str, int]:
    """The seeds of operations, as saved; those that the state knows nothing of as they are here.

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
def state_errors(state: Any) -> Iterator[None]:
    """Turn what raydist's own code raises on a state that it cannot read into an InvalidArgumentError.

    Errors of a user's functions, which may be called again while a state is loaded, stay what they are.
    """
    try:
        yield
    except RaydistError:
        raise
    except (Exception, StopIteration) as error:
        frames = list(_frames(error))
        if any(not frame.f_code.co_filename.startswith(_PACKAGE) for frame in frames[1:]):
            raise
        path = next((path for frame in reversed(frames) if (path := _part_in(frame, state)) is not None), ())
        raise _wrong(path, _problem(error)) from error


def _frames(error: BaseException) -> Iterator[Any]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _part_in(frame: Any, state: Any) -> _Path | None:
    """The innermost part of the state among the variables of a function."""
    held = {id(value) for value in frame.f_locals.values() if isinstance(value, dict | list)}
    found: _Path | None = None
    open_parts: list[tuple[_Path, Any]] = [((), state)]
    while open_parts:
        path, part = open_parts.pop()
        if id(part) in held and (found is None or len(path) > len(found)):
            found = path
        if isinstance(part, dict | list):
            open_parts += _entries(path, part)
    return found


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
