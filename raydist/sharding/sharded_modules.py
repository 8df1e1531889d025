"""The sharded modules of one replica: modules that arrive from the driver are divided by `fully_shard`.

Each replica keeps its rows of every parameter, and the gradients and optimizer states of these rows. A unit gathers its
parameters before it computes, and frees them afterwards; its gradients are weighted, added up over the replicas, and
divided again.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from raydist.actors.workers.memory_limit import return_freed_memory
from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import connect_store
from raydist.collectives.translation import translate_torch_error
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.parameter_servers.local_rows import is_table
from raydist.sharding.initial_values import change_modules, is_on_meta, materialize_module
from raydist.sharding.pipelines import Pipelines
from raydist.sharding.units import DATA_AXES, ShardingPlan, find_roots, find_units, require_apart, require_no_ties
from raydist.utils.sharded_tensors import SHARDED, is_sharded, shard_like, shard_state

# torch 2.13 has a new name for the same function, and warns of the old one
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_WHOLE_MODELS = (torch.optim.LBFGS,)
_WHOLE_TENSORS = (*_WHOLE_MODELS, torch.optim.Rprop, torch.optim.Adafactor)  # they fail, or look at single values


@final
class WeightedReduceScatter:
    """FSDP's reduce-scatter, of gradients that are weighted by this replica's share of the rows.

    Attributes:
        weight: The weight of this replica.
    """

    def __init__(self) -> None:
        self.weight = 1.0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.weight == 0.0:
            input_tensor.zero_()  # a loss without rows may be NaN
        elif self.weight != 1.0:
            input_tensor.mul_(self.weight)
        op = dist.ReduceOp.SUM
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work

    def gather(self, reference: weakref.ref[Any]) -> torch.Tensor:
        """Return all values of a parameter, as `full_tensor`, for a loss that depends on this replica's rows.

        torch's own takes the gradient of all values from one replica. Here it is weighted, and added up over the
        replicas with other rows, like the gradients that FSDP makes.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate

        parameter: Any = reference()
        names = parameter.device_mesh.mesh_dim_names or ()
        placements = [Partial() if name in DATA_AXES else Replicate() for name in names]
        values: torch.Tensor = DTensor.full_tensor(parameter, grad_placements=placements)
        if values.requires_grad:
            values.register_hook(lambda each: torch.zeros_like(each) if self.weight == 0.0 else each * self.weight)
        return values


@final
class ShardedModules:
    """The modules that one replica holds parts of. Used by the replica's thread.

    Joining a generation makes torch's default process group, on which a `DeviceMesh` is built.

    Attributes:
        pipelines: The modules of which this replica has one stage; None if the plan has no stages.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        objects: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._plan, self._rank, self._world_size = plan, rank, world_size
        self._device, self._timeout_s = device, timeout_s
        self._scatter = WeightedReduceScatter()
        self._mesh: Any = None
        self._membership: Membership | None = None
        self._objects = objects
        self._units: weakref.WeakSet[Any] = weakref.WeakSet()
        self.pipelines: Pipelines | None = None
        if device.type == "cpu":
            return_freed_memory()

    def join(self, membership: Membership) -> None:
        """Form the process group of a generation. Blocks until all replicas have joined.

        Raises:
            FailedPreconditionError: A step has failed, after which parts of the modules may not fit together.
        """
        if self._mesh is not None:
            raise FailedPreconditionError("Sharded modules must not outlive a failed step.")
        from torch.distributed import fsdp  # noqa: F401  # takes a second, which the first step must not wait for
        from torch.distributed.device_mesh import init_device_mesh

        is_gpu = self._device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_gpu else "cpu:gloo",
            store=connect_store(membership, self._timeout_s),
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=self._timeout_s),
        )
        self._membership = membership
        names, shape = zip(*self._plan.axes, strict=True)
        self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        if self._plan.pipeline is not None:
            self.pipelines = Pipelines(self._plan.pipeline, self._mesh, self._device, self._objects)

    @property
    def mesh(self) -> Any:
        """The `DeviceMesh` of all replicas; None before the first generation."""
        return self._mesh

    def weigh(self, weight: float) -> None:
        """Set the weight of this replica's gradients in the backward passes that follow."""
        self._scatter.weight = weight
        if self.pipelines is not None:
            self.pipelines.weight = weight

    def end_step(self) -> None:
        """Free what units have gathered, and still hold after forward passes without a backward pass.

        Otherwise the next pass would use them, whatever has changed since.
        """
        for unit in self._units:
            unit.reshard()

    def shard(self, items: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Shard new objects; return them, with sharded parameters in the place of whole ones.

        Raises:
            InvalidArgumentError: Modules or units share a parameter, a part cannot be divided, or an optimizer needs
                whole tensors.
        """
        for _, obj in items:
            if isinstance(obj, torch.optim.Optimizer):
                _require_elementwise(obj, _WHOLE_TENSORS if self.pipelines is None else _WHOLE_MODELS)
            elif hasattr(obj, "distributed_available_fn"):
                obj.distributed_available_fn = _never  # torchmetrics would add up the states of all replicas
        require_apart(find_roots([obj for _, obj in items if isinstance(obj, nn.Module)]))
        pipelines = self.pipelines
        found, moved = change_modules(
            items, self._shard_module if pipelines is None else lambda module: self._cut(module, pipelines)
        )
        for _, obj in found:
            if isinstance(obj, torch.optim.Optimizer):
                _move_states(obj, moved)
        return found

    def _shard_module(self, module: nn.Module) -> None:
        """Divide a module in place, and give it values if it has none."""
        if _is_sharded_already(module):
            return
        _make_fit(module)
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        if self._plan.parallelize is None:
            self._fully_shard(module)
        else:
            self._plan.parallelize(module, self._mesh)
            self._require_reduction(module)
        for part in module.modules():
            vars(part)[SHARDED] = True
        self._set_up_units(module)
        if is_on_meta(module):
            materialize_module(module, self._device)
        for name, parameter in module.named_parameters():
            parameter.grad = shard_like(gradients.get(name), parameter)
            if is_sharded(parameter):
                own: Any = parameter
                own.full_tensor = functools.partial(self._scatter.gather, weakref.ref(parameter))

    def _set_up_units(self, module: nn.Module) -> None:
        """Have FSDP's units reduce gradients by the replicas' weights."""
        from torch.distributed.fsdp import FSDPModule

        units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for unit in units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean with a factor
            unit.set_custom_reduce_scatter(self._scatter)  # type: ignore[arg-type]  # by its methods, not its base
        if self._plan.parallelize is not None:  # else units free what they gather after each pass
            self._units.update(units)

    def _cut(self, module: nn.Module, pipelines: Pipelines) -> None:
        """Divide a module into stages in place, and give it values if it has none.

        A module without parameters, as a loss, stays whole.
        """
        if next(module.parameters(), None) is not None and not _is_sharded_already(module):
            _make_fit(module)
            for part in module.modules():
                vars(part)[SHARDED] = True
            pipelines.divide(module)

    def _fully_shard(self, module: nn.Module) -> None:
        """Shard a module and its units."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        units = find_units(module, self._plan.policy)
        require_no_ties(module, units)
        # Recurrent layers keep their parameters in a list of their own: these stay whole, as outside of modules.
        recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
        kept = {parameter for part in recurrent for parameter in part.parameters()}
        kept |= {parameter for parameter in module.parameters() if parameter.ndim == 0}  # they have no rows
        kept |= {parameter for parameter in module.parameters() if is_table(parameter)}  # rows are divided otherwise
        precision = MixedPrecisionPolicy(param_dtype=self._plan.param_dtype)
        options: dict[str, Any] = {"mesh": self._mesh, "reshard_after_forward": True, "ignored_params": kept}
        if self._plan.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        for unit in (*units.values(), module):
            fully_shard(unit, mp_policy=precision, **options)

    def _require_reduction(self, module: nn.Module) -> None:
        """Raise if nothing adds up the gradients of a divided parameter over the replicas with other rows."""
        data = {name for name, size in self._plan.axes if name in DATA_AXES and size > 1}
        for name, parameter in module.named_parameters():
            found: Any = parameter
            missing = data - set(found.device_mesh.mesh_dim_names or ()) if is_sharded(found) else set()
            if missing:
                raise InvalidArgumentError(
                    f"Gradients of divided parameters must be added up over all replicas with different rows, but "
                    f"parallelize has divided {name!r} of {type(module).__name__} without the axis "
                    f"{' and '.join(sorted(missing))}. Apply fully_shard over that axis as well, after other plans."
                )

    def translate(self, error: BaseException) -> BaseException:
        """Return raydist's error for an error of torch's process group, which another replica has caused."""
        is_of_group = isinstance(error, dist.DistBackendError) or "/gloo/" in str(error)
        if self._membership is None or not (is_of_group and isinstance(error, RuntimeError)):
            return error
        return translate_torch_error(error, self._membership, "A collective of sharded modules")

    def leave(self) -> None:
        """Leave the process group, so that others that wait for this replica fail now. May be called twice."""
        if self._mesh is not None and dist.is_initialized():
            with contextlib.suppress(Exception):  # another member is gone
                dist.destroy_process_group()


def _is_sharded_already(module: nn.Module) -> bool:
    """Return True for a new module around sharded ones, without parameters of its own.

    Raises:
        InvalidArgumentError: It has both kinds of parameters.
    """
    if not any(SHARDED in vars(part) for part in module.modules()):
        return False
    own = [name for name, parameter in module.named_parameters() if not is_sharded(parameter)]
    if own:
        raise InvalidArgumentError(
            f"A module that a step has used must not become a part of a module with other parameters, but "
            f"{type(module).__name__} has {own[0]!r} beside it. Make the whole module before the first step, or call "
            "the new part on the output of the old one."
        )
    return True


def _make_fit(module: nn.Module) -> None:
    """Change the memory of parameters into that which `fully_shard` takes.

    Raises:
        InvalidArgumentError: Gradients of a part would be sparse.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise InvalidArgumentError(
                f"Gradients of sharded parameters must be dense, but {name or 'the module'!r} is an "
                f"{type(part).__name__}(sparse=True). Leave sparse out, or use ParameterServerStrategy."
            )
    for parameter in module.parameters():
        if not parameter.is_contiguous():  # of torch.channels_last
            parameter.data = parameter.data.contiguous()


def _move_states(optimizer: torch.optim.Optimizer, moved: Mapping[int, nn.Parameter]) -> None:
    """Divide the states of an optimizer like its parameters."""
    for parameter in [each for each in optimizer.state if id(each) in moved]:
        to, state = moved[id(parameter)], optimizer.state.pop(parameter)
        optimizer.state[to] = shard_state(state, to)


def _require_elementwise(optimizer: torch.optim.Optimizer, others: tuple[type, ...]) -> None:
    if isinstance(optimizer, others):
        raise InvalidArgumentError(
            f"The optimizer of sharded parameters must update each value by itself, as SGD, Adam or AdamW do, but "
            f"{type(optimizer).__name__} needs whole tensors. Use another optimizer, or MirroredStrategy."
        )
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and others is _WHOLE_TENSORS and not isinstance(optimizer, torch.optim.Adam):
        raise InvalidArgumentError(
            f"{type(optimizer).__name__}(fused=True) cannot update sharded parameters. Leave fused out."
        )


def _never() -> bool:
    return False
