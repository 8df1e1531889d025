"""`rd.summary.hparams`, `rd.summary.graph`: summaries of a whole run."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from raydist.context.current import current
from raydist.context.replica_context import ReplicaContext
from raydist.core.errors import InvalidArgumentError
from raydist.summary.record import SummaryData
from raydist.summary.recording import record


def hparams(hparams: Mapping[str, Any], metrics: Sequence[str] = ()) -> bool:
    """Record the hyperparameters of this run: TensorBoard's tab HPARAMS compares runs by them.

    Call it once per run, with a writer in the run's own directory.

    Args:
        hparams: Numbers, bools and str by name.
        metrics: Names of scalars to show next to them.

    Returns:
        True if there is a writer that takes the record; without one the call does nothing.

    Raises:
        InvalidArgumentError: A value has another type; the message names it.

    Source: tensorboard.plugins.hparams.api.hparams.

    >>> rd.summary.hparams({"lr": 0.1, "optimizer": "adam"}, metrics=["epoch_loss"])  # there is no writer
    False
    """
    if not isinstance(hparams, Mapping) or isinstance(metrics, str):
        raise InvalidArgumentError(f"hparams must be a dict, and metrics a list of names, got {hparams!r:.80}.")
    values = {str(name): _plain(name, value) for name, value in hparams.items()}
    return record("_hparams_", 0, lambda weight: Hyperparameters(values, tuple(metrics)))


def _plain(name: str, value: Any) -> bool | float | str:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgumentError(
        f"hparams[{name!r}] must be a number, a bool or a str, got {type(value).__name__}. Convert it, e.g. by str()."
    )


def graph(module: nn.Module, inputs: Any = None) -> bool:
    """Show the graph of a module: the operations that torch traces for some inputs.

    If tracing fails (a warning says why), or without inputs, the tree of submodules is shown. Tracing needs the
    package `tensorboard`. In a step the first replica traces.

    Args:
        module: The module. It is called once; its parameters and buffers do not change.
        inputs: Arguments of the call: a tensor, or a tuple of arguments.

    Returns:
        True if there is a writer that takes the record; without one the call does nothing.

    Raises:
        InvalidArgumentError: `module` is not a module.

    Source: torch.utils.tensorboard.SummaryWriter.add_graph.

    >>> import torch
    >>> rd.summary.graph(torch.nn.Linear(2, 1), torch.ones(1, 2))  # there is no writer
    False
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"graph needs a torch.nn.Module, got {type(module).__name__}. Pass model.module.")
    holder = current()
    if isinstance(holder, ReplicaContext) and holder.replica_id_in_sync_group > 0:
        return True
    return record("graph", 0, lambda weight: GraphData(_graph_of(module, inputs)))


def _graph_of(module: nn.Module, inputs: Any) -> bytes:
    if inputs is None:
        return module_tree(module)
    try:
        return _traced(module, inputs)
    except Exception as error:  # any error of a module or of the tracer
        warnings.warn(
            f"graph shows the tree of submodules of {type(module).__name__}, because torch can't trace it: "
            f"{type(error).__name__}: {error!s:.200}",
            stacklevel=5,
        )
        return module_tree(module)


def _traced(module: nn.Module, inputs: Any) -> bytes:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from torch.utils.tensorboard import SummaryWriter

    plain = copy.deepcopy(module)  # tracing may change the copy's buffers only
    given = inputs if isinstance(inputs, torch.Tensor) else tuple(inputs)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")  # warnings of the tracer about itself
        with tempfile.TemporaryDirectory() as folder:
            with SummaryWriter(folder) as writer:
                writer.add_graph(plain, given, use_strict_trace=False)
            events = [event for path in Path(folder).iterdir() for event in EventFileLoader(str(path)).Load()]
    found: bytes = next(event.graph_def for event in events if event.HasField("graph_def"))
    return found


def module_tree(module: Any) -> bytes:
    """Return a serialised GraphDef with a node for each submodule without children; TensorBoard folds it by names."""
    from tensorboardX.proto.graph_pb2 import GraphDef  # takes 0.1 s, which replicas need not spend

    root = type(module).__name__
    found = GraphDef()
    for name, part in module.named_modules():
        if not any(True for _ in part.children()):
            path = "/".join((root, *name.split("."))) if name else root
            node = found.node.add(name=path, op=type(part).__name__)
            node.attr["parameters"].s = _described(part).encode()
    return bytes(found.SerializeToString())


def _described(part: Any) -> str:
    shapes = [f"{name} {tuple(value.shape)}" for name, value in part.named_parameters(recurse=False)]
    return ", ".join([*filter(None, (part.extra_repr(),)), *shapes])


@final
@dataclass(frozen=True, slots=True)
class Hyperparameters(SummaryData):
    """The hyperparameters of a run.

    Attributes:
        values: Values by name.
        metrics: Names of scalars to show next to them.
    """

    values: Mapping[str, bool | float | str]
    metrics: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class GraphData(SummaryData):
    """A graph of operations or modules.

    Attributes:
        graph: A serialised GraphDef.
    """

    graph: bytes

    @property
    def num_bytes(self) -> int:
        return 64 + len(self.graph)
