"""The future result of a closure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, final

from raydist.core.errors import InvalidArgumentError
from raydist.core.exception_utils import folded
from raydist.core.nest import leaves_in, map_structure
from raydist.core.values import NoNumber

if TYPE_CHECKING:
    from raydist.coordinator.closures import Closure
    from raydist.coordinator.coordinator import Coordinator

_HOW_TO_READ = "Use strategy.reduce(rd.ReduceOp.MEAN, value), coordinator.fetch(value) or value.get()."


class RemoteValue(NoNumber):
    """The future result of a closure, returned by `schedule`, and by `run` under a `ParameterServerStrategy`.

    A RemoteValue stays readable after the worker that computed it has died. A RemoteValue is not a number, and cannot
    be an argument of another closure: read it first with `get`, `coordinator.fetch`, `strategy.reduce`, `gather` or
    `local_results`. If the result is a nest, `value["loss"]` is the RemoteValue of one part. Unpacking
    (`loss, accuracy = value`) waits for the result.

    Made by :meth:`ClusterCoordinator.schedule`.

    Args:
        coordinator: The coordinator that waits for the closure.
        closure: The function call.
        path: The keys that lead to one part of the result; empty for the whole result.

    Source: tf.distribute.experimental.coordinator.RemoteValue.
    """

    __nest_leaf__ = True

    def __init__(self, coordinator: Coordinator, closure: Closure, path: tuple[Any, ...] = ()) -> None:
        self._coordinator = coordinator
        self._closure = closure
        self._path = path

    @final
    @property
    def done(self) -> bool:
        """True once the closure has ended. Never blocks.

        Source: raydist's own; tf.distribute.experimental.coordinator.RemoteValue has none.
        """
        return self._closure.ended

    @final
    @folded
    def get(self) -> Any:
        """Return the nest that the function returned, with tensors on the CPU.

        Blocking: until the closure has ended. Raises if no closure at all ends for `Timeouts.step_s`.

        Returns:
            The function's return value. Each call returns the same tensors.

        Raises:
            Exception: The error that the closure raised, with its own type.
            CancelledError: The closure was cancelled, because an earlier one failed: schedule it again.
            UnavailableError: No worker is left, or the strategy was closed before the closure was done.

        Source: tf.distribute.experimental.coordinator.RemoteValue.get.
        """
        value = self._coordinator.value_of(self._closure)
        for key in self._path:
            value = value[key]
        return value

    @final
    def fetch(self) -> Any:
        """Return the same as `get`.

        Source: tf.distribute.experimental.coordinator.RemoteValue.fetch.
        """
        return self.get()

    def __getitem__(self, key: Any) -> RemoteValue:
        return RemoteValue(self._coordinator, self._closure, (*self._path, key))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    @folded
    def __repr__(self) -> str:
        return f"RemoteValue({self.get()!r})"  # printing waits for the result

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            "A RemoteValue can't be an argument of a closure, can't be used in a closure's function, and can't be "
            "pickled. Fetch it first: value.get(), or coordinator.fetch(value)."
        )

    def __getattr__(self, name: str) -> Any:
        hint = "" if name.startswith("_") else f" {_HOW_TO_READ}"
        raise AttributeError(f"'RemoteValue' object has no attribute {name!r}.{hint}", name=name, obj=self)

    @staticmethod
    def _refusal() -> str:
        return f"A RemoteValue is not a number and has no truth value. {_HOW_TO_READ}"

    @folded
    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else str(self)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        """Raise InvalidArgumentError: torch functions need tensors."""
        raise InvalidArgumentError(f"torch's {getattr(function, '__name__', function)} needs tensors. {_HOW_TO_READ}")


def fetched(values: Any) -> Any:
    """Return a nest with each RemoteValue, also in lists, replaced by its value."""
    if isinstance(values, RemoteValue):
        return values.get()
    if type(values) is list:
        return [fetched(value) for value in values]
    return map_structure(lambda leaf: fetched(leaf) if isinstance(leaf, RemoteValue | list) else leaf, values)


def holds_remote(values: Any) -> bool:
    """Return True if a nest contains a RemoteValue, also in a list."""
    if type(values) is list:
        return any(map(holds_remote, values))
    leaves = leaves_in(values)
    return any(isinstance(leaf, RemoteValue) or (type(leaf) is list and holds_remote(leaf)) for leaf in leaves)
