"""Settings of a pipeline: :class:`Options` and its groups."""

from __future__ import annotations

import enum
from typing import final

from raydist.settings import SettingsGroup, count, group, one_of, optional_count, typed

__all__ = [
    "AutoShardPolicy",
    "AutotuneOptions",
    "DistributeOptions",
    "OptimizationOptions",
    "Options",
    "ThreadingOptions",
]


@final
class AutoShardPolicy(enum.Enum):
    """How a dataset is divided between workers (tf.data.experimental.AutoShardPolicy).

    A worker is one node's share of a strategy's replicas; with one worker all policies do the same. Under FILE and OFF
    each worker has an input pipeline of its own on its node, cuts its batches into a piece for each of the N replicas
    of all workers, and deals them to its own replicas, one each a step. There global batches are not those of one
    device. A worker whose data has ended hands out no rows until all have ended; a step without any rows is left out.

    Attributes:
        AUTO: FILE if the source is files that can be shared out, else DATA; which one is logged once, as INFO.
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
        shard_pushdown: Call a map's function for the elements of one shard only.
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
    shard_pushdown = typed(True, bool)
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
