"""Pipeline parallelism: each replica computes one stage of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import nn

from raydist.context.cluster_resolver import ClusterResolver
from raydist.core.errors import InvalidArgumentError
from raydist.options import CommunicationOptions, FailureOptions, Timeouts
from raydist.replicas.launch import LaunchPlan
from raydist.replicas.rules import StrategyHooks
from raydist.sharding.stages import SCHEDULES, PipelinePlan, Split
from raydist.sharding.units import ShardingPlan
from raydist.strategies.multi_worker import WorkersStrategy
from raydist.strategies.sharded import require_fixed_size, with_sharding


@final
class PipelineStrategy(WorkersStrategy):
    """Replica actors that each compute one stage of a module, while microbatches pass from stage to stage.

    For models that are too large for one device, on devices between which the network is slow: stages exchange
    activations only. A module of the scope is cut when it reaches the replicas, and not rewritten: each replica runs
    its own forward pass, in which only the parts of its stage compute. A replica holds the parameters, gradients and
    optimizer states of its stage. A step calls `rd.get_replica_context().pipeline_step(batch, loss_fn)` in the place of
    the module and `backward()`; clipping (`rd.clip_grad_norm_`), optimizers, schedulers and metrics are as elsewhere.
    The replicas of one pipeline get the same rows, and count as one replica in sync.

    Parts of the module must be made in the order in which the forward pass calls them. From one stage to the next go
    tensors among the arguments of the next stage's first part; values that stages compute must not reach later stages
    in other ways. Stages cannot share parameters. `Model.fit`, `evaluate` and `predict` run pipelines, too, with losses
    that are functions of prediction and target. What `ShardedStrategy` says of failures, hooks, reads on the driver and
    checkpoints holds here, too; there is no `torch.amp.GradScaler`.

    Args:
        num_stages: Number of stages.
        num_replicas: Number of pipelines, which get different rows.
        num_microbatches: Least number of microbatches; a batch is cut into the next number that divides its rows.
            Default: twice the number of stages. 1F1B needs as many as stages; for fewer, GPipe's order is used.
        schedule: "1F1B" (a backward pass follows each forward pass, as soon as there is one: least memory) or "GPipe".
        split: Names of the submodules at which the second and later stages begin; or layers that are divided evenly: a
            class or classes, or a function of name and module. Default: the children of an `nn.Sequential`, or of the
            longest `nn.ModuleList` or `nn.Sequential` within the module.
        devices: A count or names of the devices of each worker. Default: all replicas on one worker.
        num_workers: Number of workers (nodes). Default: 1.
        communication_options: Options for the exchange of values.
        cluster_resolver: Names the workers' machines; see `MultiWorkerMirroredStrategy`.
        timeouts: The limit of every wait, in seconds.
        resources_per_replica: Ray resources of one replica; see `MirroredStrategy`.
        failure_options: What happens when a replica is lost or a step fails; see `ShardedStrategy`.

    Raises:
        InvalidArgumentError: An argument is out of its range; (when the replicas are first needed) the workers have
            another number of devices; (at a step) there are more stages than layers, stages share a parameter, or a
            stage needs a value that it does not get.
        DeadlineExceededError: (at the scope) the cluster can't place the workers within `timeouts.start_s`.

    Source: torch.distributed.pipelining; GPipe (Huang et al. 2019), PipeDream's 1F1B (Narayanan et al. 2019).

    >>> strategy = PipelineStrategy(num_stages=2, num_replicas=2)  # nothing is started yet
    >>> strategy.close()

    Example::

        with rd.PipelineStrategy(num_stages=4, num_microbatches=16) as strategy:
            with strategy.scope():
                model = Transformer()
                optimizer = torch.optim.AdamW(model.parameters())

            def step(batch):
                optimizer.zero_grad()
                loss = rd.get_replica_context().pipeline_step(batch, F.cross_entropy)
                optimizer.step()
                return loss
    """

    def __init__(
        self,
        num_stages: int,
        num_replicas: int = 1,
        num_microbatches: int | None = None,
        schedule: str = "1F1B",
        split: Sequence[str] | type[nn.Module] | Sequence[type[nn.Module]] | Callable[..., bool] | None = None,
        *,
        devices: int | Sequence[Any] | Any = None,
        num_workers: int | None = None,
        communication_options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | Any = None,
        timeouts: Timeouts | None = None,
        resources_per_replica: Mapping[str, float] | None = None,
        failure_options: FailureOptions | None = None,
    ) -> None:
        stages, replicas = _require_count("num_stages", num_stages), _require_count("num_replicas", num_replicas)
        least = 2 * stages if num_microbatches is None else _require_count("num_microbatches", num_microbatches)
        if schedule not in SCHEDULES:
            raise InvalidArgumentError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.")
        plan = PipelinePlan(stages, least, schedule, _as_split(split, stages))
        self._sharding = ShardingPlan((("replicate", replicas), ("stage", stages)), pipeline=plan)
        super().__init__(
            "pipeline",
            num_workers or 1,
            stages * replicas // (num_workers or 1) if devices is None else devices,
            communication_options,
            cluster_resolver,
            timeouts=timeouts,
            resources_per_replica=resources_per_replica,
            failure_options=require_fixed_size(failure_options),
        )

    def _with_rules(self, plan: LaunchPlan, rules: StrategyHooks) -> LaunchPlan:
        (_, replicas), (_, stages) = self._sharding.axes
        if len(plan.setups) != replicas * stages:
            raise InvalidArgumentError(
                f"The workers must have a device for each stage of each pipeline, {stages} x {replicas}, got "
                f"{len(plan.setups)}. Change num_stages, num_replicas, devices or num_workers."
            )
        return super()._with_rules(with_sharding(plan, self._sharding), rules)


def _require_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name} must be a number >= 1, got {value!r}.")
    return value


def _as_split(split: Any, num_stages: int) -> Split:
    if split is None:
        return None
    given = (split,) if isinstance(split, str | type) else tuple(split) if isinstance(split, tuple | list) else ()
    if given and all(isinstance(each, str) for each in given):
        if len(given) != num_stages - 1:
            raise InvalidArgumentError(
                f"split must name the first submodule of each stage but the first one, {num_stages - 1} of them, got "
                f"{list(given)}."
            )
        return given
    if given and all(isinstance(each, type) and issubclass(each, nn.Module) for each in given):
        return given
    if callable(split) and not given:
        found: Callable[[str, nn.Module], bool] = split
        return found
    raise InvalidArgumentError(
        "split must be names of submodules, a class of layers or several, or a function of name and module, got "
        f"{split!r:.100}."
    )
