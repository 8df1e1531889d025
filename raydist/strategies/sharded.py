"""Sharded data parallelism: each replica holds a part of the parameters, gradients and optimizer states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import nn

from raydist.context.cluster_resolver import ClusterResolver
from raydist.core.errors import InvalidArgumentError
from raydist.options import CommunicationOptions, FailureOptions, Timeouts
from raydist.replicas.launch import LaunchPlan
from raydist.replicas.rules import StrategyHooks
from raydist.sharding.units import DATA_AXES, ShardingPlan, UnitPolicy
from raydist.strategies.multi_worker import WorkersStrategy

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
class ShardedStrategy(WorkersStrategy):
    """Replica actors in lock step, each with a part of the parameters, gradients and optimizer states: FSDP, ZeRO-3.

    For models that are too large for one device. A step is written as for one device. Modules of the scope are divided
    by `torch.distributed.fsdp.fully_shard` when they reach the replicas: each replica keeps its rows of every
    parameter, and a *unit* of the module (a transformer's block) gathers its parameters while it computes. Each replica
    holds 1 / shard_size of parameters, gradients and optimizer states, and one unit's parameters at a time.

    On the driver, reading a parameter gathers that parameter only, `state_dict()` all of them. Checkpoints have the
    format of other strategies: save under this one and load under any other, or the other way round.

    What differs from `MirroredStrategy`: a step that fails and a lost replica end the strategy, since parts may not fit
    together any more, unless `failure_options` asks for copies; parameters cannot have hooks; optimizers must update
    each value by itself (not LBFGS, Rprop, Adafactor; SGD and Adagrad not with `fused=True`); a module is called as a
    whole, and evaluated under `torch.no_grad()`, not `torch.inference_mode()`. `no_sync()` changes nothing: gradients
    are divided at once.

    Args:
        devices: A count or names of the devices of each worker, as for MirroredStrategy. Default: all GPUs of a node,
            else one replica per CPU core.
        num_workers: Number of workers (nodes). Default: one for each node with GPUs, or with CPUs if no node has a GPU.
        shard_size: Number of replicas among which parameters are divided. Default: all. A smaller number must divide
            that of all replicas: groups of so many hold copies of each other (hybrid sharding, HSDP), best one group a
            node.
        policy: The units: "auto" (blocks of one class in an `nn.ModuleList` or `nn.Sequential`), a class or classes of
            modules, or a function of name and module.
        mixed_precision: Type in which parameters are gathered and units compute: "bf16", "fp16" or a torch.dtype.
            Parameters and optimizer states keep their own.
        cpu_offload: Keep parameters, gradients and optimizer states of GPU replicas in host memory.
        communication_options: Options for the exchange of values.
        cluster_resolver: Names the workers' machines; see `MultiWorkerMirroredStrategy`.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica; see `MirroredStrategy`.
        failure_options: What happens when a replica is lost or a step fails. By default it ends the strategy; with
            `recover=True` all processes start again and continue from copies of their parts in Ray's object store.

    Raises:
        InvalidArgumentError: An argument is out of its range; (when the replicas are first needed) `shard_size` does
            not divide the number of replicas; (at a step) units share a parameter, or an optimizer needs whole tensors.
        DeadlineExceededError: (at the scope) the cluster can't place the workers within `timeouts.start_s`.

    Source: PyTorch's FSDP2; ZeRO (Rajbhandari et al. 2020).

    >>> strategy = ShardedStrategy(2, num_workers=1)  # nothing is started yet
    >>> strategy.close()

    Example::

        with rd.ShardedStrategy(policy=Block, mixed_precision="bf16") as strategy:
            with strategy.scope():
                model = Transformer()
                optimizer = torch.optim.AdamW(model.parameters())
            for batch in strategy.distribute_dataset(dataset.batch(64)):
                loss = strategy.run(train_step, args=(batch,))
    """

    def __init__(
        self,
        devices: int | Sequence[Any] | Any = None,
        num_workers: int | None = None,
        shard_size: int | None = None,
        policy: UnitPolicy | type[nn.Module] | Literal["auto"] | Callable[[str, nn.Module], bool] | None = None,
        mixed_precision: str | torch.dtype | None = None,
        cpu_offload: bool = False,
        *,
        communication_options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | Any = None,
        timeouts: Timeouts | None = None,
        resources_per_replica: Mapping[str, float] | None = None,
        failure_options: FailureOptions | None = None,
    ) -> None:
        self._shard_size = _require_size(shard_size)
        self._sharding = ShardingPlan((), _as_policy(policy), _as_type(mixed_precision), bool(cpu_offload))
        super().__init__(
            "sharded",
            num_workers,
            devices,
            communication_options,
            cluster_resolver,
            timeouts=timeouts,
            resources_per_replica=resources_per_replica,
            failure_options=require_fixed_size(failure_options),
        )

    def _with_rules(self, plan: LaunchPlan, rules: StrategyHooks) -> LaunchPlan:
        count, size = len(plan.setups), self._shard_size or len(plan.setups)
        if count % size:
            raise InvalidArgumentError(
                f"shard_size must divide the number of replicas, got {size} for {count} replicas. Leave it out to "
                "divide parameters among all of them."
            )
        axes = (("replicate", count // size), ("shard", size)) if size < count else (("shard", size),)
        return super()._with_rules(with_sharding(plan, replace(self._sharding, axes=axes)), rules)


def with_sharding(plan: LaunchPlan, sharding: ShardingPlan) -> LaunchPlan:
    """Return the plan for replicas that divide modules."""
    setups = (replace(each, sharding=sharding, same_rows=sharding.same_rows) for each in plan.setups)
    return replace(plan, setups=tuple(setups))


def require_fixed_size(options: FailureOptions | None) -> FailureOptions | None:
    """Return the options; raise InvalidArgumentError if they let the number of replicas change."""
    if options is not None and options.elastic is not None:
        raise InvalidArgumentError(
            "failure_options must leave elastic out, since replicas that hold parts of the parameters keep their "
            f"number, got {options.elastic!r}."
        )
    return options


@final
class MeshStrategy(WorkersStrategy):
    """Replica actors in lock step on a mesh, whose modules you divide yourself: tensor parallelism, or several at once.

    `parallelize` runs on every replica when a module arrives, with torch's `DeviceMesh` of all replicas. It applies
    DTensor plans (`parallelize_module`), `fully_shard`, or both, in place. Along the axes "replicate" and "shard"
    replicas get different rows of each batch; along others ("tensor", for example) they get the same rows, and count as
    one replica in sync: `num_replicas_in_sync`, results, `rd.get_replica_context().all_reduce` and metrics are over the
    replicas with different rows. `rd.get_replica_context().device_mesh` is the mesh.

    What `ShardedStrategy` says of steps, optimizers, reads on the driver and checkpoints holds here, too. Batches are
    drawn on the driver, not inside `run`, if several replicas get the same rows.

    Args:
        mesh: Size of each axis by name, those with different rows first: {"replicate": 2, "shard": 2, "tensor": 2}. The
            number of replicas is the product. The last axis varies fastest: its replicas should be on one node.
        parallelize: Called with a module and the `DeviceMesh`; divides the module in place. Each divided parameter must
            lie on all axes with different rows (apply `fully_shard` last), unless these have size 1. Parameters that it
            leaves whole are kept equal by raydist. Modules may be on the device "meta".
        devices: A count or names of the devices of each worker. Default: all replicas on one worker.
        num_workers: Number of workers (nodes). Default: 1.
        communication_options: Options for the exchange of values.
        cluster_resolver: Names the workers' machines; see `MultiWorkerMirroredStrategy`.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica; see `MirroredStrategy`.
        failure_options: What happens when a replica is lost or a step fails. By default it ends the strategy; with
            `recover=True` all processes start again and continue from copies of their parts in Ray's object store.

    Raises:
        InvalidArgumentError: An argument is out of its range; (when the replicas are first needed) the mesh has another
            number of replicas than the workers; (at a step) gradients of a divided parameter would not be added up.
        DeadlineExceededError: (at the scope) the cluster can't place the workers within `timeouts.start_s`.

    Source: PyTorch's DeviceMesh and DTensor; Megatron-LM's tensor parallelism (Shoeybi et al. 2019).

    >>> strategy = MeshStrategy({"tensor": 2}, parallelize=lambda model, mesh: None)  # nothing is started yet
    >>> strategy.close()

    Example::

        def parallelize(model, mesh):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks:
                parallelize_module(block, mesh["tensor"], plan)
                fully_shard(block, mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])

        strategy = rd.MeshStrategy({"shard": 4, "tensor": 2}, parallelize)
    """

    def __init__(
        self,
        mesh: Mapping[str, int],
        parallelize: Callable[[nn.Module, Any], object],
        devices: int | Sequence[Any] | Any = None,
        num_workers: int | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | Any = None,
        timeouts: Timeouts | None = None,
        resources_per_replica: Mapping[str, float] | None = None,
        failure_options: FailureOptions | None = None,
    ) -> None:
        if not callable(parallelize):
            raise InvalidArgumentError(
                f"parallelize must be a function of a module and a DeviceMesh, got {parallelize!r:.80}."
            )
        self._sharding = ShardingPlan(_require_axes(mesh), parallelize=parallelize)
        self._size = math.prod(size for _, size in self._sharding.axes)
        super().__init__(
            "mesh",
            num_workers or 1,
            self._size // (num_workers or 1) if devices is None else devices,
            communication_options,
            cluster_resolver,
            timeouts=timeouts,
            resources_per_replica=resources_per_replica,
            failure_options=require_fixed_size(failure_options),
        )

    def _with_rules(self, plan: LaunchPlan, rules: StrategyHooks) -> LaunchPlan:
        if len(plan.setups) != self._size:
            shape = " x ".join(f"{name} {size}" for name, size in self._sharding.axes)
            raise InvalidArgumentError(
                f"The workers must have as many replicas as the mesh, {self._size} ({shape}), got {len(plan.setups)}. "
                "Change mesh, devices or num_workers."
            )
        return super()._with_rules(with_sharding(plan, self._sharding), rules)


def _require_axes(mesh: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    axes = tuple(mesh.items()) if isinstance(mesh, Mapping) else ()
    sizes = [size for _, size in axes]
    if (
        not axes
        or not all(isinstance(name, str) for name, _ in axes)
        or not all(type(n) is int and n >= 1 for n in sizes)
    ):
        raise InvalidArgumentError(
            f'mesh must be sizes >= 1 by the names of axes, such as {{"shard": 2, "tensor": 2}}, got {mesh!r:.100}.'
        )
    is_data = [name in DATA_AXES for name, _ in axes]
    if is_data != sorted(is_data, reverse=True):
        raise InvalidArgumentError(
            f'The axes "replicate" and "shard", along which rows differ, must come first in mesh, got {list(mesh)}. '
            "The last axis varies fastest."
        )
    return axes


def _require_size(size: int | None) -> int:
    """Return the number of replicas among which parameters are divided; 0 for all."""
    if size is None:
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidArgumentError(f"shard_size must be None (all replicas) or a number >= 1, got {size!r}.")
    return size


def _as_policy(policy: Any) -> UnitPolicy:
    if policy is None or policy == "auto":
        return "auto"
    classes = policy if isinstance(policy, tuple | list) else (policy,)
    if all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        return tuple(classes)
    if callable(policy):
        found: UnitPolicy = policy
        return found
    raise InvalidArgumentError(
        f'policy must be "auto", a class of modules or several, or a function of name and module, got {policy!r:.100}.'
    )


def _as_type(precision: Any) -> torch.dtype | None:
    found = _TYPES.get(precision, precision) if isinstance(precision, str) else precision
    if found is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise InvalidArgumentError(
            f'mixed_precision must be None, "bf16", "fp16" or a torch.dtype of real numbers, got {precision!r:.50}.'
        )
    return found
