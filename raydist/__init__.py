"""tf.data and tf.distribute for PyTorch, on Ray.

`import raydist as rd` gives the public names below. Each is imported when it is first used, so that the import itself
needs neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist.errors import CancelledError as CancelledError
    from raydist.errors import CollectiveMismatchError as CollectiveMismatchError
    from raydist.errors import DataLossError as DataLossError
    from raydist.errors import DeadlineExceededError as DeadlineExceededError
    from raydist.errors import FailedPreconditionError as FailedPreconditionError
    from raydist.errors import InvalidArgumentError as InvalidArgumentError
    from raydist.errors import NotFoundError as NotFoundError
    from raydist.errors import OutOfRangeError as OutOfRangeError
    from raydist.errors import RaydistError as RaydistError
    from raydist.errors import SpecError as SpecError
    from raydist.errors import UnavailableError as UnavailableError
    from raydist.options import InputOptions as InputOptions
    from raydist.options import RunOptions as RunOptions
    from raydist.options import Timeouts as Timeouts
    from raydist.pipelines.spec import TensorSpec as TensorSpec
    from raydist.values import AUTOTUNE as AUTOTUNE
    from raydist.values import INFINITE_CARDINALITY as INFINITE_CARDINALITY
    from raydist.values import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
    from raydist.values import InputContext as InputContext
    from raydist.values import PerReplica as PerReplica
    from raydist.values import ReduceOp as ReduceOp

__version__ = "0.1.0"

# The public names and the modules that define them. The imports above say the same to type checkers and editors.
_MODULE_OF = {
    "AUTOTUNE": "raydist.values",
    "CancelledError": "raydist.errors",
    "CollectiveMismatchError": "raydist.errors",
    "DataLossError": "raydist.errors",
    "DeadlineExceededError": "raydist.errors",
    "FailedPreconditionError": "raydist.errors",
    "INFINITE_CARDINALITY": "raydist.values",
    "InputContext": "raydist.values",
    "InputOptions": "raydist.options",
    "InvalidArgumentError": "raydist.errors",
    "NotFoundError": "raydist.errors",
    "OutOfRangeError": "raydist.errors",
    "PerReplica": "raydist.values",
    "RaydistError": "raydist.errors",
    "ReduceOp": "raydist.values",
    "RunOptions": "raydist.options",
    "SpecError": "raydist.errors",
    "TensorSpec": "raydist.pipelines.spec",
    "Timeouts": "raydist.options",
    "UNKNOWN_CARDINALITY": "raydist.values",
    "UnavailableError": "raydist.errors",
}

__all__ = sorted([*_MODULE_OF, "__version__"])


if not TYPE_CHECKING:  # type checkers know the names above, and should report any other

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'raydist' has no attribute {name!r}.")
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # the next access finds it without coming here
        return value


def __dir__() -> list[str]:
    return __all__
