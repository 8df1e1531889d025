"""`rd.State`: a program's own progress, as part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from raydist.errors import InvalidArgumentError

__all__ = ["State"]

_METHODS = ("state_dict", "load_state_dict")
_MOST_LEVELS = 50


@final
class State:
    """Named values in a checkpoint, for the progress of a program: an epoch, a best score, a count.

    Args:
        values: JSON values (numbers, text, truth values, None, lists, dicts with text as keys) by name.

    Raises:
        InvalidArgumentError: A value is none of these, or a name is reserved; the message names the entry.

    >>> progress = rd.State(epoch=0, best=0.0)
    >>> progress.epoch += 1
    >>> progress
    State(epoch=1, best=0.0)

    Source: `tf.Variable`s in a tf.train.Checkpoint.
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in _METHODS:
            raise InvalidArgumentError(
                f"A value of rd.State may have any name that does not begin with '_' and is none of {_METHODS}, got "
                f"{name!r}. Give it another one."
            )
        _require_json(value, name, 0)
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"This rd.State has {sorted(self.__dict__)}, and no {name!r}. Assign it first.")

    def __repr__(self) -> str:
        return f"State({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name.

        Returns:
            A new dict; lists and dicts in it are not copied.

        Raises:
            InvalidArgumentError: A list or a dict now contains a value that is not JSON.

        >>> rd.State(epoch=3).state_dict()
        {'epoch': 3}

        Source: raydist's own; torch.nn.Module.state_dict.
        """
        for name, value in self.__dict__.items():
            _require_json(value, name, 0)
        return dict(self.__dict__)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the values of `state`. Values that `state` lacks stay unchanged.

        Args:
            state: Result of `state_dict`.

        Raises:
            InvalidArgumentError: A value is not JSON; nothing is changed.

        >>> progress = rd.State(epoch=0)
        >>> progress.load_state_dict({"epoch": 3})
        >>> progress.epoch
        3

        Source: raydist's own; torch.nn.Module.load_state_dict.
        """
        for name, value in State(**state).__dict__.items():
            setattr(self, name, value)


def _require_json(value: Any, path: str, level: int) -> None:
    if level > _MOST_LEVELS:
        raise InvalidArgumentError(
            f"A value of rd.State may be nested {_MOST_LEVELS} levels deep, {path:.100} is deeper."
        )
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for index, part in enumerate(value):
            _require_json(part, f"{path}.{index}", level + 1)
    elif type(value) is dict and all(type(key) is str for key in value):
        for key, part in value.items():
            _require_json(part, f"{path}.{key}", level + 1)
    else:
        raise InvalidArgumentError(
            f"The entry {path!r} of rd.State must be a JSON value (a number, text, True or False, None, a list, a dict "
            f"with text as keys), got {value!r:.100} ({type(value).__name__}). Give tensors to an object of your own "
            "with state_dict and load_state_dict."
        )
