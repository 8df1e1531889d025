"""The pipelined modules of one replica: steps through `torch.distributed.pipelining`, and the exchange of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.exception_utils import annotate
from raydist.core.nest import flatten, map_structure, unflatten
from raydist.sharding.initial_values import is_on_meta, materialize_module
from raydist.sharding.pipelined_module import PassRecord, PipelinedModule
from raydist.sharding.stages import PipelinePlan, map_stages
from raydist.utils.sharded_tensors import STAGES, is_sharded
from raydist.utils.stage_tensors import Placeholder

_MOST_KEPT = 8  # schedules of different shapes, each with memory for the activations that it receives
_BUCKET_BYTES = 32 << 20


@final
class Pipelines:
    """The pipelined modules of one replica, and its place among the others.

    Args:
        plan: The division into stages and microbatches.
        mesh: The `DeviceMesh`, with the axes "replicate" and "stage".
        device: Device of this replica.
        objects: Returns all mirrored objects.

    Attributes:
        weight: Share of this replica's rows in the global batch; 0 if its rows do not count.
    """

    def __init__(
        self, plan: PipelinePlan, mesh: Any, device: torch.device, objects: Callable[[], Iterable[Any]]
    ) -> None:
        self._plan, self._device, self._objects = plan, device, objects
        self._stage: int = mesh.get_local_rank("stage")
        self._stages, self._copies = mesh.get_group("stage"), mesh.get_group("replicate")
        self.weight = 1.0

    def divide(self, module: nn.Module) -> None:
        """Divide a module in place, and give it values if it has none."""
        stages = map_stages(module, self._plan)
        if is_on_meta(module):
            materialize_module(module, self._device, lambda name: stages.tensors[name] == self._stage)
        PipelinedModule(module, stages, self._stage, self._plan.num_stages, self._stages, self._device)

    def step(
        self, batch: Any, loss_fn: Callable[..., Any], model: nn.Module | None = None, *, adds_up: bool = False
    ) -> Any:
        """Run a step of one module; see `ReplicaContext.pipeline_step`. Blocks until all stages are done.

        With `adds_up` gradients are those of the sum of the microbatches' losses, not of their mean.
        """
        objects = list(self._objects())
        module = _module_of(objects if model is None else [model])
        _require_no_others(objects)
        microbatches = Microbatches(batch, self._plan)
        counts = _counts_of_metrics(objects)
        trains = torch.is_grad_enabled()
        earlier = {each: each.grad for each in module.parameters if each.grad is not None} if trains else {}
        adds_here = self._copies.size() == 1 and self.weight > 0
        for parameter in () if adds_here else earlier:
            parameter.grad = None
        module.in_step = True
        try:
            with _random_numbers_of(self._stage, self._device):
                weight = self.weight if adds_up else self.weight / microbatches.count
                found = self._schedule(module, microbatches, trains=trains).run(microbatches, loss_fn, weight)
        finally:
            module.in_step = False
        if _counts_of_metrics(objects) != counts:
            raise FailedPreconditionError(
                "loss_fn must not update metrics, because it runs in the last stage only. Return the values, as in "
                "`return loss, outputs`, and update the metrics with what pipeline_step returns."
            )
        if trains and not adds_here:
            self._exchange(module.parameters)
            for parameter, gradient in earlier.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        told = [map_structure(_on_cpu, found)]
        dist.broadcast_object_list(told, group=self._stages, group_src=self._plan.num_stages - 1)
        return map_structure(self._on_device, told[0])

    def _schedule(self, module: PipelinedModule, microbatches: Microbatches, *, trains: bool) -> _Schedule:
        kind = self._device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (module.modes, microbatches.signature, trains, cast, torch.is_inference_mode_enabled())
        made: _Schedule | None = module.schedules.pop(key, None)
        if made is None:
            while len(module.schedules) >= _MOST_KEPT:
                module.schedules.popitem(last=False)
            made = _Schedule(module, self._plan, self._stage, self._stages, self._device, microbatches, trains=trains)
        module.schedules[key] = made  # the last one used comes last
        return made

    def _exchange(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up gradients over the replicas with other rows; those of rows that do not count are zero."""
        for bucket in _buckets(parameters):
            given = [each.grad for each in bucket]
            parts = [
                torch.zeros(each.numel(), dtype=each.dtype, device=each.device)
                if gradient is None or self.weight == 0.0
                else gradient.reshape(-1)
                for each, gradient in zip(bucket, given, strict=True)
            ]
            there = parts[0].new_tensor([gradient is not None for gradient in given])
            flat = torch.cat([*parts, there])
            dist.all_reduce(flat, group=self._copies)
            *sums, anywhere = flat.split([len(part) for part in (*parts, there)])
            for parameter, total, is_there in zip(bucket, sums, anywhere.tolist(), strict=True):
                parameter.grad = total.view_as(parameter) if is_there else None

    def _on_device(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf


def _module_of(objects: Iterable[Any]) -> PipelinedModule:
    found = [vars(each).get(STAGES) for each in objects if isinstance(each, nn.Module)]
    modules = [each for each in found if isinstance(each, PipelinedModule)]
    if len(modules) != 1:
        raise FailedPreconditionError(
            f"pipeline_step runs a module of the strategy's scope as a whole, got {len(modules)} to choose from. "
            "Give it the module: pipeline_step(batch, loss_fn, model=...)."
        )
    return modules[0]


def _require_no_others(objects: Iterable[Any]) -> None:
    """Raise if there is a parameter that no stage holds."""
    if any(isinstance(each, nn.Parameter) and not is_sharded(each) for each in objects):
        raise FailedPreconditionError(
            "Under PipelineStrategy all parameters of the scope must belong to modules, which are cut into stages, "
            "but one belongs to none. Make it a parameter of a module."
        )


def _counts_of_metrics(objects: Iterable[Any]) -> list[int]:
    """Return how often each metric of torchmetrics was updated."""
    return [each.update_count for each in objects if hasattr(each, "update_count")]


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one type, not too many at a time."""
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        bucket = by_type.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(each.nbytes for each in bucket) >= _BUCKET_BYTES:
            yield by_type.pop(parameter.dtype)
    yield from by_type.values()


@contextlib.contextmanager
def _random_numbers_of(stage: int, device: torch.device) -> Iterator[None]:
    """Return a context in which each stage draws other random numbers, which follow from the replica's generator."""
    seed = int(torch.randint(2**62, (1,))) + stage  # drawn before: all stages draw the same
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


@final
class Microbatches:
    """A batch in parts of equal size.

    Args:
        batch: Inputs and targets: tensors, or nests of tensors, with one element per row.
        plan: Says how many parts.

    Attributes:
        count: Number of parts.
        signature: Hashable; equal for parts with equal structures, shapes and types.

    Raises:
        InvalidArgumentError: `batch` is no pair, or its tensors differ in their rows.

    >>> found = Microbatches((torch.arange(4), {"label": torch.arange(4)}), PipelinePlan(2, 2, "1F1B"))
    >>> found.inputs(1), found.targets(1)
    (((tensor([2, 3]),), {}), {'label': tensor([2, 3])})
    """

    def __init__(self, batch: Any, plan: PipelinePlan) -> None:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InvalidArgumentError(
                f"pipeline_step takes a pair (inputs, targets), got {batch!r:.80}. Targets may be None."
            )
        self._leaves, self._structure = flatten(tuple(batch))
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        rows = {len(leaf) if leaf.ndim else None for leaf in tensors}
        if len(rows) != 1 or None in rows:
            raise InvalidArgumentError(
                "All tensors of a batch that is cut into microbatches must have the same number of rows, got shapes "
                f"{[tuple(leaf.shape) for leaf in tensors]}. Give loss_fn other tensors as a closure, and the module "
                "as buffers."
            )
        num_rows = len(tensors[0])
        self.count = plan.count_microbatches(num_rows)
        self._size = num_rows // self.count
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in self._leaves]
        self.signature = (str(self._structure), tuple(shapes))

    def _part(self, number: int) -> Any:
        rows = slice(number * self._size, (number + 1) * self._size)
        leaves = [leaf[rows] if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        return unflatten(self._structure, leaves)

    def inputs(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the module."""
        inputs = self._part(number)[0]
        if isinstance(inputs, Mapping):
            return (), dict(inputs)
        return (inputs if isinstance(inputs, tuple) else (inputs,)), {}

    def targets(self, number: int) -> Any:
        """Return the targets."""
        return self._part(number)[1]


@final
class _Schedule:
    """One stage of a module, with torch's schedule for one shape of microbatches."""

    def __init__(
        self,
        module: PipelinedModule,
        plan: PipelinePlan,
        stage: int,
        group: Any,
        device: torch.device,
        microbatches: Microbatches,
        *,
        trains: bool,
    ) -> None:
        from torch.distributed import pipelining

        try:
            record = module.record(*microbatches.inputs(0))
        except Exception as error:
            annotate(
                error,
                "The error comes from a forward pass with tensors that have shapes and types but no values, by which "
                "raydist finds what stages exchange.",
            )
            raise
        self._submodule = _Stage(module, record, is_last=stage == plan.num_stages - 1)
        made = pipelining.PipelineStage(
            self._submodule,
            stage,
            plan.num_stages,
            device,
            input_args=_examples(record.sent[stage - 1]) if stage else (),
            output_args=_examples(record.sent[stage])
            if stage < plan.num_stages - 1
            else (torch.empty((), device="meta", requires_grad=trains),),
            group=group,
        )
        few = microbatches.count < plan.num_stages  # which 1F1B refuses; the order is the same
        order = pipelining.ScheduleGPipe if few or plan.schedule == "GPipe" else pipelining.Schedule1F1B
        self._trains = trains
        self._order: Any = order(made, microbatches.count, _same if trains else None, scale_grads=False)

    def run(self, microbatches: Microbatches, loss_fn: Callable[..., Any], weight: float) -> Any:
        """Run all microbatches, with `weight` as a factor of each one's loss.

        Return the mean loss, and what else `loss_fn` returned; None but in the last stage.
        """
        numbers = torch.arange(microbatches.count)
        stage = self._submodule
        stage.begin(microbatches, loss_fn, weight)
        try:
            self._order.step(number=numbers, target=numbers if self._trains else None, return_outputs=False)
        except Exception:
            if stage.error is not None:
                raise stage.error from None  # torch's error is about the schedule
            raise
        return stage.take_results()


def _same(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output


def _examples(expected: Mapping[int, Placeholder]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty(tuple(like.shape), dtype=like.dtype, device="meta", requires_grad=like.requires_grad)
        for like in expected.values()
    )


@final
class _Stage(nn.Module):
    """The submodule of torch's stage: computes a microbatch, and in the last stage its loss."""

    def __init__(self, module: PipelinedModule, record: PassRecord, *, is_last: bool) -> None:
        super().__init__()
        self._compute = module.run
        self._record, self._is_last = record, is_last
        self._results: list[tuple[torch.Tensor, Any]] = []
        self.error: Exception | None = None

    def begin(self, microbatches: Microbatches, loss_fn: Callable[..., Any], weight: float) -> None:
        """Begin a step."""
        self._microbatches, self._loss_fn, self._weight = microbatches, loss_fn, weight
        self._results, self.error = [], None

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        try:
            args, kwargs = self._microbatches.inputs(int(number))
            found = self._compute(self._record, args, kwargs, received)
            return self._loss(found, int(number)) if self._is_last else found
        except Exception as error:
            self.error = error
            raise

    def _loss(self, output: Any, number: int) -> torch.Tensor:
        found = self._loss_fn(output, self._microbatches.targets(number))
        loss, more = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
            raise InvalidArgumentError(
                "loss_fn must return the mean loss of its rows, a tensor without dimensions, or a pair of that and of "
                f"values to return, got {found!r:.80}."
            )
        self._results.append((loss.detach(), map_structure(_detached, more)))
        return loss * self._weight

    def take_results(self) -> Any:
        """Return the mean loss, or the pair of that and the other results, whose rows are joined."""
        results, self._results = self._results, []
        del self._microbatches, self._loss_fn
        if not results:
            return None
        loss = torch.stack([loss for loss, _ in results]).mean()
        if results[0][1] is None:
            return loss
        return loss, map_structure(_joined, *(more for _, more in results))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _joined(*leaves: Any) -> Any:
    """Return the rows of all microbatches, or the mean of single numbers."""
    tensors = [torch.as_tensor(leaf) for leaf in leaves]
    if tensors[0].ndim:
        return torch.cat(tensors)
    stacked = torch.stack(tensors)
    return (stacked if stacked.is_floating_point() else stacked.double()).mean()
