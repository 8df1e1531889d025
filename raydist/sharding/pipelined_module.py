"""A module of which a replica computes one stage, by the module's own forward pass.

`forward` runs on every replica of a pipeline. The calls of parts in earlier stages return placeholders, the call of the
first part of this replica's stage gets the tensors that the stage before has sent, and the call of the first part of
the next stage ends the pass. Which tensors are sent is found by a pass with placeholders alone, for each shape of
inputs.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from raydist.compat.torch_internals import buffer_table
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import Structure, flatten, unflatten
from raydist.sharding.stages import StageMap
from raydist.utils.sharded_tensors import STAGES
from raydist.utils.stage_tensors import Holder, Placeholder, held_by, map_leaves, written_by

_COMPILED = "dynamo_ctx"  # an attribute of what torch.compile returns for a module


@final
@dataclass(frozen=True)
class PassRecord:
    """Findings of a pass with placeholders, for one shape of inputs.

    Attributes:
        outputs: By stage, what its parts returned, in the order of their calls: leaves and structure.
        sent: By stage but the first, the placeholders among the arguments of its first part, by position.
    """

    outputs: tuple[tuple[tuple[Sequence[Any], Structure], ...], ...]
    sent: tuple[dict[int, Placeholder], ...]


@final
class _Part:
    """The `forward` of a part of a pipelined module."""

    def __init__(self, module: PipelinedModule, name: str, part: nn.Module, stage: int, *, starts: bool) -> None:
        self._module, self.name, self.stage, self.starts = module, name, stage, starts
        self.compute = part.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.call(self, args, kwargs)


@final
class _StageEnd(BaseException):
    """The end of a pass, with what the next stage needs. Not an Exception, which the module might catch."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.leaves = leaves


@final
class PipelinedModule:
    """One replica's stage of a module, which is changed in place: parameters of other stages become placeholders.

    Args:
        root: The module.
        stages: Its stages.
        stage: Number of this replica's stage.
        num_stages: Number of stages.
        group: Process group of the stages.
        device: Device of this replica.

    Attributes:
        in_step: True while a step runs, whose backward passes may compute parts of this stage again.
        schedules: Objects that run this stage, by the kind of the batch, of which the caller keeps a few.
    """

    def __init__(
        self, root: nn.Module, stages: StageMap, stage: int, num_stages: int, group: Any, device: torch.device
    ) -> None:
        if _COMPILED in vars(root):
            raise InvalidArgumentError(
                "A module that is cut into stages must not be compiled as a whole. Compile its layers: "
                "layer.compile() for each."
            )
        self._root, self._stage, self._num_stages = root, stage, num_stages
        self._forward = root.forward
        self.schedules: OrderedDict[Any, Any] = OrderedDict()
        self._pass: _StagePass | _PlaceholderPass | None = None
        self.in_step = False
        for name, of in stages.parts.items():
            part = root.get_submodule(name)
            part.forward = _Part(self, name, part, of, starts=name in stages.starts)
        root.forward = self._refuse
        for part in root.modules():
            vars(part)[STAGES] = None
        vars(root)[STAGES] = self
        self._divide(stages, group, device)

    def _divide(self, stages: StageMap, group: Any, device: torch.device) -> None:
        """Note the stage of each tensor, and free the parameters of others."""
        made: dict[int, nn.Parameter] = {}
        for path, parameter in [*self._root.named_parameters(remove_duplicate=False)]:
            holder = Holder(stages.tensors[path], stages.tensors[path] == self._stage, group)
            if holder.is_here:
                held_by(parameter, holder)
                continue
            if id(parameter) not in made:
                placeholder = Placeholder.like(parameter.detach())
                placeholder.home = device
                empty = nn.Parameter(placeholder, requires_grad=parameter.requires_grad)
                made[id(parameter)] = empty
                held_by(empty, holder)
            owner, _, name = path.rpartition(".")
            setattr(self._root.get_submodule(owner), name, made[id(parameter)])
        for path, buffer in self._root.named_buffers():
            held_by(buffer, Holder(stages.tensors[path], stages.tensors[path] == self._stage, group))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this stage that are trained."""
        return [each for each in self._root.parameters() if each.requires_grad and not isinstance(each, Placeholder)]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Conditions for shapes and types, beside the inputs: training mode, and which parameters are trained."""
        return (self._root.training, *(each.requires_grad for each in self._root.parameters()))

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FailedPreconditionError(
            f"A replica of a pipeline has one stage of a {type(self._root).__name__}, so a step cannot call it. Call "
            "rd.get_replica_context().pipeline_step(batch, loss_fn), under torch.no_grad() to evaluate."
        )

    def call(self, part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a part that is called, as the pass that is under way needs it."""
        if self._pass is not None:
            return self._pass.call(part, args, kwargs)
        if self.in_step and part.stage == self._stage:  # an activation checkpoint computes again
            args, kwargs = _with_received(part, (args, kwargs))
            return part.compute(*args, **kwargs)
        return self._refuse()

    def run(
        self, record: PassRecord, args: Sequence[Any], kwargs: dict[str, Any], received: Sequence[torch.Tensor]
    ) -> Any:
        """Return the tensors for the next stage, or the result of the module in the last stage."""
        self._pass = _StagePass(record, self._stage, received)
        try:
            result = self._forward(*args, **kwargs)
        except _StageEnd as end:
            return self._sent(record.sent[self._stage], end.leaves)
        finally:
            self._pass = None
        for leaf in flatten(result)[0]:
            if isinstance(leaf, Placeholder):
                raise _out_of_reach("the result of the module")
        return result

    def _sent(self, expected: dict[int, Placeholder], leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        for position in expected:
            if isinstance(leaves[position], Placeholder):
                raise _out_of_reach(f"an argument of the first part of stage {self._stage + 1}")
        # Under autocast a type may be another one than placeholders have.
        return tuple(leaves[position].to(like.dtype).contiguous() for position, like in expected.items())

    def record(self, args: Sequence[Any], kwargs: dict[str, Any]) -> PassRecord:
        """Run a pass with placeholders; raise if parts are called in another order than that of the stages."""
        kept = [(part, dict(vars(part)), dict(buffer_table(part))) for part in self._root.modules()]
        values = [buffer.detach().clone() for buffer in self._root.buffers()]
        direct: dict[str, torch.Tensor] = {name: Placeholder.like(each) for name, each in self._root.named_parameters()}
        passed = _PlaceholderPass(self._num_stages)
        self._root.forward, self._pass = self._forward, passed
        # Without this module nothing is compiled; importing it takes a second.
        may_compile = "torch._dynamo" in sys.modules
        try:
            with torch.compiler.set_stance("force_eager") if may_compile else contextlib.nullcontext():
                torch.func.functional_call(self._root, direct, tuple(args), kwargs)
        finally:
            self._pass = None
            for part, attributes, table in kept:
                vars(part).clear()
                vars(part).update(attributes)
                buffer_table(part).update(table)
            with torch.no_grad():
                for buffer, value in zip(self._root.buffers(), values, strict=True):
                    buffer.copy_(value)
        return passed.record()


def _out_of_reach(place: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"From one stage to the next go the arguments of the next stage's first part, but {place} depends on another "
        "value, or a parameter, of another stage. Pass it on as an argument of the parts between, or give split other "
        "submodules."
    )


def _with_received(part: _Part, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Return arguments with what another stage has sent in the place of placeholders."""
    leaves, structure = flatten(given)
    if not any(isinstance(leaf, Placeholder) for leaf in leaves):
        return given
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Placeholder):
            if leaf.received is None:
                raise _out_of_reach(f"an argument of {part.name!r}")
            leaves[place] = leaf.received
    return unflatten(structure, leaves)


@final
class _StagePass:
    """A pass that computes one stage."""

    def __init__(self, record: PassRecord, stage: int, received: Sequence[torch.Tensor]) -> None:
        self._stage, self._received, self._is_inside = stage, received, stage == 0
        self._earlier: Iterator[Any] = iter([each for outputs in record.outputs[:stage] for each in outputs])
        self._expected = record.sent[stage - 1] if stage else {}

    def call(self, part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if part.starts and part.stage == self._stage + 1:
            raise _StageEnd(flatten((args, kwargs))[0])
        if part.starts and part.stage == self._stage and not self._is_inside:
            self._is_inside = True
            leaves = flatten((args, kwargs))[0]
            for position, values in zip(self._expected, self._received, strict=True):
                leaves[position].received = values
        if not self._is_inside:
            leaves, structure = next(self._earlier)
            return unflatten(structure, [each.detach() if isinstance(each, Placeholder) else each for each in leaves])
        args, kwargs = _with_received(part, (args, kwargs))
        return part.compute(*args, **kwargs)


@final
class _PlaceholderPass:
    """A pass with placeholders in the place of everything that parts compute."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._outputs: list[list[tuple[Sequence[Any], Structure]]] = [[]]
        self._sent: list[dict[int, Placeholder]] = []

    def call(self, part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = flatten((args, kwargs))
        stage = len(self._sent)
        if part.starts and part.stage == stage + 1:
            self._sent.append({place: each for place, each in enumerate(leaves) if isinstance(each, Placeholder)})
            self._outputs.append([])
        elif part.stage != stage:
            raise InvalidArgumentError(
                f"Parts of a pipelined module must be made in the order in which it calls them, but {part.name!r}, "
                f"which is in stage {part.stage}, is called in stage {stage}. Make it where it is used, or give split "
                "other submodules."
            )
        args, kwargs = unflatten(structure, [_as_placeholder(leaf) for leaf in leaves])
        with _EverythingHeldElsewhere():
            result = part.compute(*args, **kwargs)
        found, structure = flatten(result)
        found = [_as_placeholder(leaf) for leaf in found]
        self._outputs[-1].append((found, structure))
        return unflatten(structure, found)

    def record(self) -> PassRecord:
        """Return what the pass has found; raise if it has not reached the last stage."""
        if len(self._sent) + 1 < self._num_stages:
            raise InvalidArgumentError(
                f"Each forward pass must call the first part of every stage, but it ended in stage {len(self._sent)} "
                f"of {self._num_stages}. Give split submodules that every pass calls."
            )
        return PassRecord(tuple(map(tuple, self._outputs)), tuple(self._sent))


def _as_placeholder(leaf: Any) -> Any:
    return Placeholder.like(leaf) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Placeholder) else leaf


@final
class _EverythingHeldElsewhere(TorchFunctionMode):
    """A context in which functions of torch return placeholders, and write to nothing else."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        target = written_by(func, args, given)
        if target is not None and not isinstance(target, Placeholder):
            return target
        return map_leaves(_as_placeholder, func(*args, **given))
