"""Optimizers of a user's class for the tensors of a parameter server, and the check that servers can use the class.

Each server steps its slices of a variable independently, so an optimizer must be elementwise. The check is a trial: one
optimizer steps a small parameter, two other optimizers step two parts of the same parameter, and the results must be
equal.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from raydist.core.errors import InvalidArgumentError

_NOT_OPTIONS = ("params", "param_names")


def bare_optimizer(
    kind: type[torch.optim.Optimizer], groups: Sequence[tuple[Mapping[str, Any], Sequence[torch.Tensor]]]
) -> torch.optim.Optimizer:
    """Make an optimizer with empty state without calling its constructor, as unpickling does.

    Args:
        groups: Options and tensors of each parameter group. The tensors need not require gradients.
    """
    param_groups = [{"params": list(tensors), **server_options(options)} for options, tensors in groups]
    defaults = server_options(groups[0][0]) if groups else {}
    made = kind.__new__(kind)
    made.__setstate__({"defaults": defaults, "state": defaultdict(dict), "param_groups": param_groups})
    return made


def is_of_torch(kind: type[torch.optim.Optimizer]) -> bool:
    """Return True if the optimizer's class is one of `torch.optim`."""
    return kind.__module__.startswith("torch.optim.")


def step_bare(optimizer: torch.optim.Optimizer) -> None:
    """Do one step of the optimizer with the gradients of its tensors. Does not check indices of sparse gradients."""
    with torch.sparse.check_sparse_tensor_invariants(False):  # set explicitly, so that torch does not warn
        if isinstance(optimizer, torch.optim.Adagrad):
            _begin_adagrad(optimizer)
        if not is_of_torch(type(optimizer)):
            optimizer.step()
            return
        with torch.no_grad():
            # torch's wrapper of `step`, for differentiable steps, would import torch's compiler, which takes 2 to 8 s.
            inspect.unwrap(type(optimizer).step)(optimizer)


def _begin_adagrad(optimizer: torch.optim.Adagrad) -> None:
    """Set the initial state of tensors without state. torch 2.11 sets it only in the constructor."""
    start = optimizer.defaults.get("initial_accumulator_value", 0)
    for group in optimizer.param_groups:
        for value in group["params"]:
            if value.grad is not None and not optimizer.state[value]:
                optimizer.state[value] = torch.optim.Adagrad([value], initial_accumulator_value=start).state[value]


def may_fuse(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> bool:
    """Return True if torch has a fused kernel for this optimizer's step, and the options do not demand another one.

    Fused and unfused step of 2 million parameters on one core: Adam 2.3 and 18 ms, Adagrad 1.8 and 4.4 ms, SGD with
    momentum 1.3 and 2.0 ms.

    >>> may_fuse(torch.optim.Adam, {"fused": None, "foreach": None}, [torch.float32])
    True
    """
    asked = options.get("fused") is False or options.get("foreach")
    known = "fused" in options and is_of_torch(kind) and not asked
    return known and all(dtype in (torch.float32, torch.float64) for dtype in dtypes)


def has_fused_layout(value: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any]) -> bool:
    """Return True if the layout of these tensors suits torch's fused kernel, which ignores strides.

    >>> value = torch.zeros(2, 3)
    >>> has_fused_layout(value, torch.ones(2, 3), {"exp_avg": torch.ones(3, 2).t()})
    False
    """
    shape, dtype = value.shape, value.dtype  # read once, because this function runs for every slice of every push
    if not _is_contiguous_like(gradient, shape, dtype):
        return False
    for name, each in state.items():
        if each is None:
            continue
        if not isinstance(each, torch.Tensor):
            return False
        if not (_is_contiguous_like(each, shape, dtype) if name != "step" else each.dim() == 0):
            return False
    return True


def _is_contiguous_like(tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return True if the tensor is contiguous, and has this shape and dtype."""
    return tensor.dtype is dtype and tensor.shape == shape and tensor.layout is torch.strided and tensor.is_contiguous()


def server_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options for a server: tensors on the CPU, no CUDA graph capture, no differentiable steps.

    >>> server_options({"lr": 0.1, "capturable": True, "params": []})
    {'lr': 0.1, 'capturable': False}
    """
    kept = {name: value for name, value in options.items() if name not in _NOT_OPTIONS}
    for name, value in kept.items():
        if isinstance(value, torch.Tensor):
            kept[name] = value.detach().to("cpu")
    for name in ("capturable", "differentiable"):
        if kept.get(name):
            kept[name] = False
    return kept


_ROWS, _COLUMNS = 6, 4
_FIRST_PART = 2  # rows of the first part
_STEPS = 4
_SPARSE_ROWS = torch.tensor([0, 1, 3, 4])  # rows that have a gradient in sparse trials
_MIN_LR = 1e-3  # with a learning rate of 0, at the start of a warm-up, the trial would find no difference

_Form = Literal["dense", "rows"]
_Kind = type[torch.optim.Optimizer]


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise InvalidArgumentError if parameter servers cannot use an optimizer. Takes some milliseconds."""
    kind = type(optimizer)
    for group in optimizer.param_groups:
        reason = reason_not_elementwise(kind, group)
        if reason is not None:
            raise InvalidArgumentError(
                f"Optimizers must be elementwise under ParameterServerStrategy, because each server steps only its own "
                f"rows of a variable, but {kind.__name__} {reason}. Use torch.optim.SGD, Adagrad, AdamW or another "
                "elementwise optimizer, or MultiWorkerMirroredStrategy."
            )


def reason_not_elementwise(kind: _Kind, options: Mapping[str, Any]) -> str | None:
    """Return the reason why servers cannot use this class of optimizers; None if they can.

    >>> reason_not_elementwise(torch.optim.LBFGS, {"lr": 1.0})
    'demands a closure in step()'
    >>> reason_not_elementwise(torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0})
    """
    if _demands_closure(kind):
        return "demands a closure in step()"
    tried = dict(options)
    if "lr" in tried and float(tried["lr"]) < _MIN_LR:
        tried["lr"] = _MIN_LR
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            return _find_difference(kind, tried, "dense")
        except Exception as dense:
            try:
                return _find_difference(kind, tried, "rows")
            except Exception:
                return f"could not step a small parameter in a trial ({type(dense).__name__}: {dense})"


def state_bytes_per_byte(kind: _Kind, options: Mapping[str, Any]) -> float:
    """Return the bytes of optimizer state for each byte of parameters; 0 if the trial fails.

    >>> state_bytes_per_byte(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0})
    1.0
    """
    forms: tuple[_Form, ...] = ("dense", "rows")
    for form in forms:
        start, gradients = _make_trial(form)
        with contextlib.suppress(Exception):
            parameter, states = _step_copy(kind, options, start, gradients[:1])
            state = states.get(parameter, {})
            held = [each for each in state.values() if isinstance(each, torch.Tensor) and each.shape == start.shape]
            return sum(each.nbytes for each in held) / start.nbytes
    return 0.0


def _demands_closure(kind: _Kind) -> bool:
    parameters = list(inspect.signature(kind.step).parameters.values())[1:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters)


def _find_difference(kind: _Kind, options: Mapping[str, Any], form: _Form) -> str | None:
    """Return how steps of two parts differ from steps of the whole parameter; None if they are equal."""
    start, gradients = _make_trial(form)
    value, states = _step_copy(kind, options, start, gradients)
    if others := [key for key in states if key is not value]:
        return f"keeps state {others[0]!r} that belongs to no parameter (servers keep only state[parameter][name])"
    parts = [
        _step_copy(kind, options, start[rows], [_part(each, rows) for each in gradients])
        for rows in (slice(0, _FIRST_PART), slice(_FIRST_PART, _ROWS))
    ]
    if not _is_close(value, torch.cat([part for part, _ in parts])):
        return "updates rows of a variable differently if they are on different servers"
    for name, whole in states.get(value, {}).items():
        pieces = [states_of_part.get(part, {}).get(name) for part, states_of_part in parts]
        if not _is_same_state(whole, pieces):
            return f"computes the state {name!r} differently if rows are on different servers"
    return None


def _step_copy(
    kind: _Kind,
    options: Mapping[str, Any],
    start: torch.Tensor,
    gradients: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, dict[Any, dict[str, Any]]]:
    """Step a copy of a parameter with a new optimizer. Return the copy, and the optimizer's state."""
    parameter = start.clone()
    optimizer = bare_optimizer(kind, [(server_options(options), [parameter])])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step_bare(optimizer)
        parameter.grad = None
    return parameter, dict(optimizer.state)


def _make_trial(form: _Form) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(rows, _COLUMNS, dtype=torch.float64, generator=generator)

    start = draw(_ROWS)
    if form == "dense":
        return start, [draw(_ROWS) for _ in range(_STEPS)]
    return start, [
        torch.sparse_coo_tensor(
            _SPARSE_ROWS[None], draw(len(_SPARSE_ROWS)), start.shape, is_coalesced=True, check_invariants=False
        )
        for _ in range(_STEPS)
    ]


def _part(gradient: torch.Tensor, rows: slice) -> torch.Tensor:
    if not gradient.is_sparse:
        return gradient[rows]
    inside = (rows.start <= _SPARSE_ROWS) & (rows.stop > _SPARSE_ROWS)
    shape = (rows.stop - rows.start, _COLUMNS)
    values = gradient.values()[inside]
    return torch.sparse_coo_tensor(
        _SPARSE_ROWS[inside][None] - rows.start, values, shape, is_coalesced=True, check_invariants=False
    )


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def _is_same_state(whole: Any, pieces: Sequence[Any]) -> bool:
    if not isinstance(whole, torch.Tensor):
        return all(type(piece) is type(whole) for piece in pieces)
    if not all(isinstance(piece, torch.Tensor) for piece in pieces):
        return False
    if whole.dim() and len(whole) == _ROWS:
        return _is_close(whole, torch.cat(list(pieces)))
    return all(piece.shape == whole.shape and _is_close(piece, whole) for piece in pieces)
