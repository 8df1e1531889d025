"""One device in the driver's process: the reference that every other strategy must agree with. Needs no Ray."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from raydist.cluster.preemption import note_draws, pass_draw
from raydist.collectives.base import Membership
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.single_rank import SingleRank
from raydist.context.current import enter_replica, process_counter
from raydist.context.devices import Device, parse_device
from raydist.context.replica_context import NoPeers, ReplicaContext
from raydist.context.run_call import add_hint, plain_call, require_call
from raydist.context.strategy import Strategy, require_dataset
from raydist.context.strategy_values import StrategyStats, ValueContext
from raydist.core.errors import InvalidArgumentError
from raydist.core.exception_utils import annotate, folded
from raydist.core.nest import leaves_in, map_structure
from raydist.core.values import InputContext
from raydist.dataset import Dataset
from raydist.distributed_dataset import LocalDistributedDataset, require_batches, require_shared
from raydist.mirroring.checked_steps import CheckedSteps
from raydist.mirroring.object_kinds import names_of
from raydist.options import InputOptions, RunOptions
from raydist.pipelines.elements.object_leaves import map_parts
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.optional import Optional

_DEFAULTS = RunOptions()


@final
class OneDeviceStrategy(Strategy):
    """A strategy with one device, in this process.

    Variables are plain modules on `device`, batches and results are plain tensors, and `run` calls the function at
    once. The strategy starts nothing and needs no Ray. As with several replicas, modules and parameters that a step
    uses must be made under the scope.

    Args:
        device: "cpu", "cuda:0", "GPU:0" or a torch.device.

    Raises:
        InvalidArgumentError: `device` names no device, or a GPU that does not exist.

    Source: tf.distribute.OneDeviceStrategy.

    >>> strategy = OneDeviceStrategy("cpu")
    >>> strategy.run(lambda x: x + 1, args=(torch.tensor(1),))
    tensor(2)
    """

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()
        self._device = parse_device(device)
        self._torch_device = _present(self._device)
        self._batches = _Batches()
        self._num_steps = 0
        self._steps: CheckedSteps | None = CheckedSteps(f"this {type(self).__name__}", self._torch_device.type)
        self._made = self._steps.scope
        self._policy = NonfinitePolicy(lambda parameters: names_of(parameters, self._made.objects()))

    @functools.cached_property
    def _reducer(self) -> GradientReducer:
        """The reducer of a single rank, which checks gradients for NaN and infinities."""
        if self._steps is None:
            raise InvalidArgumentError(
                "RunOptions(on_nonfinite=...) needs a strategy whose scope has made the model, got the default one, "
                "which knows no parameters. Make a strategy, rd.OneDeviceStrategy() for example."
            )
        group = SingleRank(Membership("one device", generation=0, rank=0, world_size=1))
        return GradientReducer(group, policy=self._policy)

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return (str(self._device),)

    @contextlib.contextmanager
    def _mark_created(self) -> Iterator[None]:
        # Within the context torch's factory functions create on the device, so that modules need no .to().
        with self._made.enter(), self._torch_device if self._torch_device.type != "cpu" else contextlib.nullcontext():
            yield

    def _has_made(self, obj: Any) -> bool:
        return obj in self._made

    def _set_gradient_reduce_op(self, options: RunOptions) -> None:
        """Do nothing: the gradients of one replica are the global ones under any reduction."""

    @folded
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        self._begin_run()
        require_call(fn, args, kwargs, options)
        choice = (options or _DEFAULTS).on_nonfinite
        checks = self._reducer if choice != "pass" else None
        peers = NoPeers(self._torch_device, checks)
        args, named = plain_call(args, kwargs)
        leaves = leaves_in(args) + (leaves_in(named) if named else [])
        if self._steps is not None:
            self._steps.check(fn, leaves)
        rows = self._batches.rows_of_first(leaves)
        peers.rows = None if rows is None else (rows,)
        if DatasetIterator in map(type, leaves):
            args, named = map_structure(
                lambda leaf: _LoopIterator(leaf, peers, self._batches) if type(leaf) is DatasetIterator else leaf,
                (args, named),
            )
            peers.loop = self
        self._num_steps += 1
        with enter_replica(ReplicaContext(self, peers)):
            try:
                if checks is None:
                    return fn(*args, **named)
                checks.attach(_parameters_among(self._made.objects()))
                with self._policy.run(choice), checks.step(index=self._num_steps - 1):
                    return fn(*args, **named)
            except BaseException as error:
                add_hint(error)
                annotate(error, f"In step {self._num_steps - 1} on replica 0 ({self._torch_device}).")
                raise
            finally:
                if peers.loop is not None:
                    note_draws()

    def make_replica_context(self) -> ReplicaContext:
        """Return the context of the only replica, as `rd.get_replica_context()` does in a step without a batch.

        Returns:
            A new ReplicaContext of this strategy.

        >>> OneDeviceStrategy("cpu").make_replica_context().replica_id_in_sync_group
        0
        """
        return ReplicaContext(self, NoPeers(self._torch_device))

    def _note_batch(self, batch: Any, num_rows: int) -> None:
        self._require_open("read a distributed dataset")
        self._batches.note(leaves_in(batch), num_rows)

    def distribute_dataset(self, dataset: Dataset | DataLoader[Any], options: InputOptions | None = None) -> Any:
        require_shared(options or InputOptions())
        require_batches(require_dataset(dataset))
        return self._distribute(dataset, options, dealt=False)

    def _distribute(
        self, dataset: Dataset | DataLoader[Any], options: InputOptions | None, *, dealt: bool
    ) -> LocalDistributedDataset:
        self._require_open("distribute a dataset")
        return LocalDistributedDataset(
            require_dataset(dataset),
            device=self._torch_device,
            options=options or InputOptions(),
            on_batch=self._note_batch,
            dealt=dealt,
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> Any:
        return self._distribute(dataset_fn(InputContext()), options, dealt=True)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        return value_fn(ValueContext(0, 1))

    def stats(self) -> StrategyStats:
        return StrategyStats(self._num_steps, self._policy.num_found, self._policy.num_skipped)

    def close(self) -> None:
        self._closed = True

    def _abort(self, *, fetch: bool) -> None:
        self._closed = True


def default_strategy() -> OneDeviceStrategy:
    """Return the strategy outside of every scope. It accepts objects that were not made under a scope."""
    strategy = OneDeviceStrategy("cpu")
    strategy._steps = None
    strategy._is_default = True
    strategy._counter = process_counter()  # every call makes another strategy
    return strategy


def _parameters_among(objects: Iterable[Any]) -> list[torch.nn.Parameter]:
    """Return the parameters among some objects, those of modules included."""
    found: list[torch.nn.Parameter] = []
    for obj in objects:
        if isinstance(obj, torch.nn.Module):
            found.extend(obj.parameters(recurse=False))
        elif isinstance(obj, torch.nn.Parameter):
            found.append(obj)
    return found


def _num_rows(leaves: Sequence[Any]) -> int:
    """Return the rows of a batch: the length of its first leaf that has one."""
    for leaf in leaves:
        if shape := getattr(leaf, "shape", ()):
            rows: int = shape[0]
            return rows
    return 1


def _parts(leaves: Sequence[Any]) -> Sequence[Any]:
    """Return the leaves, with the items of lists in place of the lists."""
    if not any(isinstance(leaf, list | tuple | dict) for leaf in leaves):
        return leaves
    parts: list[Any] = []
    map_parts(parts.append, list(leaves))
    return parts


@final
class _Batches:
    """The rows of batches of distributed datasets, by the objects in them, for `ctx.num_rows`."""

    def __init__(self) -> None:
        self._rows = WeakIdKeyDictionary()

    def note(self, leaves: Sequence[Any], num_rows: int) -> None:
        """Remember the leaves of a batch as long as they live."""
        for leaf in _parts(leaves):
            with contextlib.suppress(TypeError):  # numbers and strings allow no weak reference
                self._rows[leaf] = num_rows

    def rows_of_first(self, leaves: Sequence[Any]) -> int | None:
        """Return the rows of the batch with the first known leaf among `leaves`; None if there is none."""
        for leaf in _parts(leaves) if self._rows else ():
            with contextlib.suppress(TypeError):
                found: int | None = self._rows.get(leaf)
                if found is not None:
                    return found
        return None


def _present(device: Device) -> torch.device:
    if device.kind == "GPU" and device.index >= (count := torch.cuda.device_count()):
        raise InvalidArgumentError(
            f"{device} was asked for, and torch sees {count} GPUs in this process. Install a build of torch for GPUs "
            'and check the driver (nvidia-smi), see what CUDA_VISIBLE_DEVICES leaves, or use "CPU:0".'
        )
    return torch.device(device.torch_name)


@final
class _LoopIterator(Iterator[Any]):
    """An iterator in the arguments of `run`, which reports the rows of each batch to the replica context."""

    def __init__(self, inner: DatasetIterator[Any], peers: NoPeers, batches: _Batches) -> None:
        self._inner = inner
        self._peers = peers
        self._batches = batches

    def __next__(self) -> Any:
        pass_draw()
        return self._noted(next(self._inner))

    def get_next(self) -> Any:
        """Return the next batch; raise OutOfRangeError at the end."""
        pass_draw()
        return self._noted(self._inner.get_next())

    def get_next_as_optional(self) -> Optional[Any]:
        """Return the next batch, or an empty Optional at the end."""
        pass_draw()
        found = self._inner.get_next_as_optional()
        if found.has_value():
            self._noted(found.get_value())
        return found

    def _noted(self, batch: Any) -> Any:
        leaves = leaves_in(batch)
        noted = self._batches.rows_of_first(leaves)
        self._peers.rows = (_num_rows(leaves) if noted is None else noted,)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
