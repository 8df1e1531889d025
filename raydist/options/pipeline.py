"""Options of a pipeline: :class:`Options` and its groups."""

from __future__ import annotations

import enum
from typing import final

from raydist.options.settings import SettingsGroup, count, group, one_of, optional_count, typed


@final
class AutoShardPolicy(enum.Enum):
    """Policies for dividing a dataset between workers (tf.data.experimental.AutoShardPolicy).

    A worker is one node with its replicas; with one worker all policies are equivalent. Under FILE and OFF each worker
    has an input pipeline on its node, splits its batches into one piece for each of the N replicas of all workers, and
    gives each of its own replicas one piece per step. Global batches then differ from those on one device. A worker
    whose data has ended contributes no rows until all have ended; a step without any rows is skipped.

    Attributes:
        AUTO: FILE if the source consists of files that can be divided, else DATA; the choice is logged once, as INFO.
        FILE: Whole files for each worker: worker w of W reads files w, w + W, ..., of each input of `zip` and
            `concatenate`; a `shuffle` of file names shuffles each worker's own. Needs as many files as workers.
        DATA: One pipeline serves all workers: every element once, global batches as on one device.
        OFF: Every worker reads everything.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"


@final
class AutotuneOptions(SettingsGroup):
    """Limits for automatic choices of raydist.

    Attributes:
        enabled: Measure while a pipeline runs, and choose all parallelism and sizes that are not given: the placement
            of maps and filters (the iterating thread, or a number of threads), read-ahead of the pipeline, and the
            number of elements that a `prefetch` keeps ready. `ds.stats()` shows the choices and their reasons. False:
            the iterating thread does all work, and such a `prefetch` keeps 2 elements.
        cpu_budget: Maximum number of threads for all functions of a pipeline together, including `num_parallel_calls`,
            and for automatic read-ahead. None: the requested threads, and for all else the number of this process's
            cores.
        ram_budget: Maximum number of bytes in the buffers of a pipeline: elements in prefetch buffers, and blocks on
            their way to threads that the autotuner chose. One element may always be ready. With input workers, it also
            limits the elements that each `shuffle` holds in the object store (the object store itself may take up to
            1.6 times as much, and 128 MB more): a `shuffle` that needs more raises an UnavailableError. None: half of
            the free memory for the buffers, and no limit for a shuffle.

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
        noop_elimination: Remove operations without effect: `take(-1)`, `skip(0)`, `repeat(1)`, `shuffle(1)`.
        map_fusion: Run neighbouring maps in one loop.
        filter_fusion: Run a filter in one loop with its neighbours.
        late_gather: Let `shuffle`, `take`, `skip` and `repeat` over data in memory or in mapped files move indices.
        map_and_batch_fusion: Let a map before a `batch` produce whole batches, which then need no copy.
        map_parallelization: Let raydist choose the parallelism of maps without `num_parallel_calls`; False: 1.
        map_vectorization: Run map functions that are written in torch over whole blocks (`torch.func.vmap`). The first
            and the last element of each block are checked; a function that cannot be vectorised is called for every
            element, with a warning. False by default: other elements may differ in the last bit.
        shuffle_and_repeat_fusion: Draw one permutation per pass if a repeated `shuffle` holds the whole source.
        common_subgraph_elimination: Compute the common inputs of a `zip` once.
        shard_pushdown: Call a map's function for the elements of one shard only.
        inject_prefetch: Read a pipeline with functions ahead in a thread while the autotuner measures that this is
            faster.

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
    shard_pushdown = typed(True, bool)
    inject_prefetch = typed(True, bool)


@final
class ThreadingOptions(SettingsGroup):
    """Threads of one iterator.

    Attributes:
        private_threadpool_size: Threads for the maps and filters whose parallelism raydist chooses; None or 0: the
            iterating thread does the work.

    Source: tf.data.ThreadingOptions.

    >>> rd.Dataset.range(3).with_options(Options(threading=ThreadingOptions(private_threadpool_size=2))).options()
    Options(threading=ThreadingOptions(private_threadpool_size=2))
    """

    __slots__ = ()
    private_threadpool_size = optional_count(None, 0)


@final
class Options(SettingsGroup):
    """Settings of a whole pipeline (tf.data.Options), applied by `dataset.with_options(options)`.

    Explicitly set values override values set earlier in the pipeline; the options of all inputs are merged. Settings
    can be given by name, or set afterwards.

    Attributes:
        seed: Root of every random choice without its own seed; None draws one when iteration starts.
        deterministic: False lets maps and filters on threads or input workers return results as they complete: a slow
            element does not delay others, and the order differs from run to run. See `Dataset.map`.
        autotune: Limits for automatic choices: :class:`AutotuneOptions`.
        optimization: Enabled rewrites: :class:`OptimizationOptions`.
        threading: Threads of an iterator: :class:`ThreadingOptions`.
        auto_shard_policy: Policy for dividing the dataset between workers.
        on_error: "raise": an element's error is raised in its place, and iteration continues after it.
        num_input_workers: Actors that run the map and filter functions when a strategy iterates; 0 for none. Only input
            workers survive a function that crashes, exits its process or takes too much memory: the worker is
            replaced, and the responsible element is an error in its place.
        input_worker_memory: Bytes that each input worker may take beyond its initial memory: more is a MemoryError;
            None for the free memory of its machine when it starts.

    Raises:
        AttributeError: The setting does not exist.
        TypeError: The value has the wrong type.
        InvalidArgumentError: The options belong to a dataset and are read-only.

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
        """TensorFlow's access to `auto_shard_policy`: values set on the result are set on these options.

        >>> options = Options()
        >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE
        >>> options.auto_shard_policy
        <AutoShardPolicy.FILE: 'FILE'>
        """
        return DistributeOptions(self)


@final
class DistributeOptions:
    """The distribution options in TensorFlow's place: :attr:`Options.experimental_distribute`.

    Args:
        options: Options that hold the settings.

    Source: tf.data.experimental.DistributeOptions.

    >>> DistributeOptions(Options(auto_shard_policy=AutoShardPolicy.OFF)).auto_shard_policy
    <AutoShardPolicy.OFF: 'OFF'>
    """

    __slots__ = ("_options",)

    def __init__(self, options: Options) -> None:
        self._options = options

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The `auto_shard_policy` of the options.

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
