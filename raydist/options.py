"""Settings a user hands in: for a pipeline, for distributed input, for one `run`, and every time limit."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, final

from raydist.errors import InvalidArgumentError
from raydist.settings import SettingsGroup, count, group, one_of, optional_count, typed
from raydist.values import AUTOTUNE, ReduceOp

__all__ = [
    "AutoShardPolicy",
    "AutotuneOptions",
    "DistributeOptions",
    "InputOptions",
    "OptimizationOptions",
    "Options",
    "RunOptions",
    "ThreadingOptions",
    "Timeouts",
]


def _require(ok: bool, what: str, got: object) -> None:
    if not ok:
        raise InvalidArgumentError(f"{what}, got {got!r}.")


@final
class AutoShardPolicy(enum.Enum):
    """How a dataset is divided between workers (tf.data.experimental.AutoShardPolicy).

    Attributes:
        AUTO: FILE if the source is files, else DATA.
        FILE: Whole files for each worker.
        DATA: One pipeline serves all workers, every element once.
        OFF: Every worker reads everything.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"


@final
class AutotuneOptions(SettingsGroup):
    """What raydist may use where it is left to choose.

    Attributes:
        enabled: Measure while a pipeline runs, and choose for everything whose parallelism or size was left open: where
            maps and filters run (the thread that iterates, or so many threads), whether the pipeline is read ahead, and
            how many elements a `prefetch` keeps ready. `ds.stats()` tells what was decided and why. False: the thread
            that iterates does all work, and such a `prefetch` keeps 2 elements.
        cpu_budget: At most this many threads for all functions of a pipeline together, `num_parallel_calls` included,
            and for reading ahead without being asked. None: what was asked for, and for all else as many as this
            process has cores.
        ram_budget: At most this many bytes in the buffers of a pipeline: what prefetches hold, and the blocks on their
            way to threads that the autotuner chose. One element may always be ready. None: half of the memory that is
            free.

    Source: tf.data.experimental.AutotuneOptions.

    >>> AutotuneOptions(cpu_budget=2)
    AutotuneOptions(cpu_budget=2)
    """

    __slots__ = ()
    enabled = typed(True, bool)
    cpu_budget = optional_count(None, 1)
    ram_budget = optional_count(None, 1)


@final
class OptimizationOptions(SettingsGroup):
    """Rewrites of a pipeline; none of them changes an element.

    Attributes:
        noop_elimination: Leave out operations that change nothing: `take(-1)`, `skip(0)`, `repeat(1)`, `shuffle(1)`.
        map_fusion: Run neighbouring maps in one loop.
        filter_fusion: Run a filter in one loop with its neighbours.
        late_gather: Let `shuffle`, `take`, `skip` and `repeat` over data in memory or in mapped files move indices.
        map_and_batch_fusion: Let a map in front of a `batch` work on whole batches, which are then no copies.
        map_parallelization: Leave the parallelism of maps without `num_parallel_calls` to raydist; False: 1.
        map_vectorization: Run map functions that are written in torch over whole blocks (`torch.func.vmap`). The first
            and the last element of each block are checked; a function that cannot be run so is called for every
            element, with a warning. False by default: other elements may differ in the last bit.
        shuffle_and_repeat_fusion: Draw one permutation a pass where a repeated `shuffle` holds the whole source.
        common_subgraph_elimination: Compute once what a `zip` reads twice.
        dead_column_pruning: Let `from_arrow` and `from_parquet` leave out columns that the first map provably does not
            look at. Damage to such a column in a file is then not found.
        shard_pushdown: Call a map's function for the elements of one shard only.
        window_stacking: Cut the batches of `window(...).flat_map(lambda w: w.batch(n))` from the input without a
            dataset for each window, where the function provably does nothing else.
        inject_prefetch: Read a pipeline with functions ahead in a thread while that makes the whole faster, as the
            autotuner measures.

    Source: tf.data.experimental.OptimizationOptions.

    >>> ds = rd.Dataset.range(3).take(-1)
    >>> as_written = ds.with_options(Options(optimization=OptimizationOptions(noop_elimination=False)))
    >>> "noop_elimination" in ds.explain(), "as optimised (noop_elimination)" in as_written.explain()
    (True, False)
    """

    __slots__ = ()
    noop_elimination = typed(True, bool)
    map_fusion = typed(True, bool)
    filter_fusion = typed(True, bool)
    late_gather = typed(True, bool)
    map_and_batch_fusion = typed(True, bool)
    map_parallelization = typed(True, bool)
    map_vectorization = typed(False, bool)
    shuffle_and_repeat_fusion = typed(True, bool)
    common_subgraph_elimination = typed(True, bool)
    dead_column_pruning = typed(True, bool)
    shard_pushdown = typed(True, bool)
    window_stacking = typed(True, bool)
    inject_prefetch = typed(True, bool)


@final
class ThreadingOptions(SettingsGroup):
    """Threads of one iterator.

    Attributes:
        private_threadpool_size: Threads for the maps and filters whose parallelism was left to raydist; None or 0 for
            none: the thread that iterates does the work.

    Source: tf.data.ThreadingOptions.

    >>> rd.Dataset.range(3).with_options(Options(threading=ThreadingOptions(private_threadpool_size=2))).options()
    Options(threading=ThreadingOptions(private_threadpool_size=2))
    """

    __slots__ = ()
    private_threadpool_size = optional_count(None, 0)


@final
class Options(SettingsGroup):
    """Settings of a whole pipeline (tf.data.Options), applied by `dataset.with_options(options)`.

    What is set explicitly wins over what was set earlier in the pipeline; the options of all inputs are merged.
    Settings can be given by name, or set afterwards.

    Attributes:
        seed: Root of every random choice that has no seed of its own; None draws one when iteration starts.
        deterministic: False lets maps and filters that run on threads or input workers hand out results as they are
            finished: a slow element holds back no other, and the order differs from run to run. See `Dataset.map`.
        autotune: What raydist may use where it is left to choose: :class:`AutotuneOptions`.
        optimization: Which rewrites are on: :class:`OptimizationOptions`.
        threading: Threads of an iterator: :class:`ThreadingOptions`.
        auto_shard_policy: How a strategy divides the dataset between workers.
        on_error: "raise": an element's error is raised at its place, and iteration goes on after it.
        num_input_workers: Actors that run the map and filter functions when a strategy iterates; 0 for none. Only such
            workers survive a function that crashes, leaves its process or takes too much memory: the worker is
            replaced, and the element that did it is an error at its place.
        input_worker_memory: Bytes that each of them may take beyond what it starts with: more is a MemoryError; None
            for what is free on its machine when it starts.

    Raises:
        AttributeError: There is no setting of that name.
        TypeError: The value has the wrong type.
        InvalidArgumentError: The options are those of a dataset, which cannot be changed.

    Source: tf.data.Options.

    >>> options = Options(seed=1)
    >>> options.optimization.map_fusion = False
    >>> options
    Options(seed=1, optimization=OptimizationOptions(map_fusion=False))
    """

    __slots__ = ()
    seed = optional_count(None, 0)
    deterministic = typed(True, bool)
    autotune = group(AutotuneOptions)
    optimization = group(OptimizationOptions)
    threading = group(ThreadingOptions)
    auto_shard_policy = one_of(AutoShardPolicy.DATA, *AutoShardPolicy)
    on_error = one_of("raise", "raise")
    num_input_workers = count(0, 0)
    input_worker_memory = optional_count(None, 1)

    @property
    def experimental_distribute(self) -> DistributeOptions:
        """TensorFlow's place for `auto_shard_policy`: what is set there is set here.

        >>> options = Options()
        >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE
        >>> options.auto_shard_policy
        <AutoShardPolicy.FILE: 'FILE'>
        """
        return DistributeOptions(self)


@final
class DistributeOptions:
    """What a strategy may do with a dataset, in TensorFlow's place: :attr:`Options.experimental_distribute`.

    Args:
        options: Hold the settings.

    Source: tf.data.experimental.DistributeOptions.

    >>> DistributeOptions(Options(auto_shard_policy=AutoShardPolicy.OFF)).auto_shard_policy
    <AutoShardPolicy.OFF: 'OFF'>
    """

    __slots__ = ("_options",)

    def __init__(self, options: Options) -> None:
        self._options = options

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """`auto_shard_policy` of the options.

        >>> Options().experimental_distribute.auto_shard_policy
        <AutoShardPolicy.DATA: 'DATA'>
        """
        policy: AutoShardPolicy = self._options.auto_shard_policy
        return policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        self._options.auto_shard_policy = policy

    def __repr__(self) -> str:
        return f"DistributeOptions(auto_shard_policy={self.auto_shard_policy!r})"


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """How a distributed dataset is produced and split (tf.distribute.InputOptions).

    Attributes:
        split: "per_batch" cuts each global batch of b rows into N pieces of ceil(b / N), later ones shorter or
            empty; "balanced" gives every replica b // N or one more, and takes turns with the extra rows.
        num_input_workers: Actors that run the map and filter functions; 0 runs them in the process that hosts the
            pipeline; AUTOTUNE (default) lets raydist choose.
        resources_per_input_worker: Ray resources of one input worker, e.g. {"CPU": 1}; "memory" (bytes) is also what
            it may take at most.
        prefetch_batches: Global batches kept ready at most; None for the number of replicas, and for more of small ones
            that are taken quickly: for a tenth of a second, in some megabytes a replica.
        per_replica: For `distribute_datasets_from_function`: call the function once per replica, not once per worker.
        zero_copy: Hand out read-only mappings of the object store on the CPU. A step must not work in place on them.

    Raises:
        InvalidArgumentError: A value is none of these.

    Source: tf.distribute.InputOptions, with settings of its own.

    >>> InputOptions(split="balanced", num_input_workers=2).split
    'balanced'
    """

    split: Literal["per_batch", "balanced"] = "per_batch"
    num_input_workers: int = AUTOTUNE
    resources_per_input_worker: Mapping[str, float] = field(default_factory=dict)
    prefetch_batches: int | None = None
    per_replica: bool = False
    zero_copy: bool = False

    def __post_init__(self) -> None:
        _require(self.split in ("per_batch", "balanced"), 'split must be "per_batch" or "balanced"', self.split)
        workers = self.num_input_workers
        _require(workers >= 0 or workers == AUTOTUNE, "num_input_workers must be >= 0 or AUTOTUNE", workers)
        ahead = self.prefetch_batches
        _require(ahead is None or ahead >= 1, "prefetch_batches must be >= 1 or None", ahead)


@final
@dataclass(frozen=True, slots=True)
class RunOptions:
    """How one `strategy.run` treats gradients and replicas without rows.

    Attributes:
        gradient_reduce_op: MEAN weighs each replica by its share of the global batch's rows; SUM adds, for losses
            with a global denominator. None takes the scope's choice (MEAN unless given).
        empty_batch: "stand_in" runs a replica without rows on two rows of the same global batch and drops everything
            it produces; "zero_rows" hands it the zero rows and keeps its results, as TensorFlow does.
        check_in_sync: After every so many batches the replicas compare parameters and the state of optimizers; 0 for
            never. Costs a checksum of both, 6 GB/s.

    Raises:
        InvalidArgumentError: A value is none of these.

    Source: tf.distribute.RunOptions, with settings of its own.

    >>> RunOptions(gradient_reduce_op="sum").gradient_reduce_op
    <ReduceOp.SUM: 'SUM'>
    """

    gradient_reduce_op: ReduceOp | None = None
    empty_batch: Literal["stand_in", "zero_rows"] = "stand_in"
    check_in_sync: int = 100

    def __post_init__(self) -> None:
        op = self.gradient_reduce_op
        if op is not None:
            object.__setattr__(self, "gradient_reduce_op", ReduceOp.parse(op))
            _require(
                self.gradient_reduce_op in (ReduceOp.SUM, ReduceOp.MEAN), "gradient_reduce_op must be SUM or MEAN", op
            )
        _require(
            self.empty_batch in ("stand_in", "zero_rows"),
            'empty_batch must be "stand_in" or "zero_rows"',
            self.empty_batch,
        )
        every = self.check_in_sync
        _require(isinstance(every, int) and every >= 0, "check_in_sync must be a number of batches, or 0", every)


@final
@dataclass(frozen=True, slots=True)
class Timeouts:
    """The limit of every wait, in seconds. No wait of raydist is longer than one of these.

    Attributes:
        start_s: Until Ray is up and every actor is placed and answers.
        collective_s: One collective: how long ranks wait for the slowest of them (its compute included).
        step_s: One dispatched step, from its dispatch to its result, queueing included.
        input_s: The next element from an input pipeline.
        element_s: A user's function on one block, on a pool of input workers; a worker that is stuck is killed then.
        close_s: Until everything has stopped when closing; what still lives then is killed.
        poll_s: One long poll between actors; only a longer limit above ends a wait.

    Raises:
        InvalidArgumentError: A limit is no finite number > 0.

    >>> Timeouts(step_s=60).step_s
    60
    """

    start_s: float = 120.0
    collective_s: float = 300.0
    step_s: float = 3600.0
    input_s: float = 600.0
    element_s: float = 600.0
    close_s: float = 10.0
    poll_s: float = 5.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            _require(
                isinstance(value, int | float) and 0 < value < float("inf"),
                f"Timeouts.{limit.name} must be a finite number of seconds > 0",
                value,
            )
