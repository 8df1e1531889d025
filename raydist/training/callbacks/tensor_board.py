"""A callback that writes logs of `fit` for TensorBoard."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.pipelines.formats.files import local_file
from raydist.replicas.recovery import ReplicaFailure
from raydist.strategies.synchronous import SynchronousStrategy
from raydist.summary.histograms import histogram
from raydist.summary.media import image, text
from raydist.summary.projector import embedding
from raydist.summary.runs import graph
from raydist.summary.scalars import scalar
from raydist.summary.writer import SummaryWriter, create_file_writer
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.learning_rates import rates_of

if TYPE_CHECKING:
    import os

    from raydist.distributed_dataset import DistributedDataset
    from raydist.pipelines.metering.stats import PipelineStats


@final
@dataclass(frozen=True, slots=True)
class ShownParameters:
    """The parameters that are shown, and the epochs after which they are shown.

    Attributes:
        histogram_freq: Epochs between histograms of all parameters; 0: never.
        write_images: With the histograms, show two-dimensional parameters as pictures.
        embeddings_freq: Epochs between writes of embedding weights for the projector; 0: never.
        embeddings_metadata: A label for each row: one list for all embeddings, or a dict of lists by name.

    Raises:
        InvalidArgumentError: A number is negative.
    """

    histogram_freq: int = 0
    write_images: bool = False
    embeddings_freq: int = 0
    embeddings_metadata: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        if min(self.histogram_freq, self.embeddings_freq) < 0:
            raise InvalidArgumentError(
                "histogram_freq and embeddings_freq must be >= 0, got "
                f"{self.histogram_freq!r} and {self.embeddings_freq!r}."
            )

    def show(self, module: nn.Module, epoch: int) -> None:
        """Write the parts due after an epoch, counted from 0, to the default writer."""
        if _is_due(self.histogram_freq, epoch):
            self._show_histograms(module)
        if _is_due(self.embeddings_freq, epoch):
            for name, part in module.named_modules():
                if isinstance(part, nn.Embedding):
                    embedding(name or "embedding", part.weight, metadata=self._labels(name))

    def _show_histograms(self, module: nn.Module) -> None:
        for name, value in module.named_parameters():
            path = name.replace(".", "/")
            histogram(f"{path}/histogram", value)
            if self.write_images and value.dim() == 2:
                image(f"{path}/image", _as_picture(value), max_outputs=1, dataformats="HW")

    def _labels(self, name: str) -> Sequence[Any] | None:
        given = self.embeddings_metadata
        return given.get(name) if isinstance(given, Mapping) else given


def _is_due(every: int, epoch: int) -> bool:
    return every > 0 and epoch % every == 0


def _as_picture(values: torch.Tensor) -> torch.Tensor:
    """Scale values to [0, 1]; constant values become grey."""
    plain = values.detach().float()
    least, most = plain.min(), plain.max()
    return (plain - least) / (most - least) if most > least else torch.full_like(plain, 0.5)


@final
class InputClock:
    """A clock for the time that training waits for input: from a step's dispatch until the next batch is drawn.

    Args:
        now: Returns the time in seconds.

    >>> times = iter([0.0, 2.0, 3.0, 4.0, 5.0, 5.0])
    >>> clock = InputClock(lambda: next(times))
    >>> clock.begin()
    >>> clock.drawn()
    >>> clock.dispatched()
    >>> clock.drawn()
    >>> clock.waiting(), clock.seconds()
    (3.0, 5.0)
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began = self._since = self._batch_began = 0.0
        self._waited = 0.0

    def begin(self) -> None:
        """Start an epoch."""
        self._began = self._since = self._batch_began = self._now()
        self._waited = 0.0

    def drawn(self) -> None:
        """Record that a batch was drawn."""
        self._batch_began = self._now()
        self._waited += self._batch_began - self._since

    def dispatched(self) -> None:
        """Record that the batch's step was dispatched: the wait for the next batch begins."""
        self._since = self._now()

    def waiting(self) -> float:
        """Return the seconds of the epoch that training has waited for batches."""
        return self._waited

    def seconds(self) -> float:
        """Return the seconds since the epoch began."""
        return self._now() - self._began

    def steps_per_second(self, steps: int) -> float:
        """Return the rate of `steps` steps since the last batch was drawn."""
        seconds = self._now() - self._batch_began
        return steps / seconds if seconds > 0 else 0.0


@final
class TensorBoard(Callback):
    """A callback that writes the logs of `fit` as event files: `tensorboard --logdir logs` shows them.

    The curves of the training are in `log_dir/train`, the curves of validations in `log_dir/validation`, under the same
    names: `epoch_loss`, `epoch_learning_rate`, `batch_loss`, ... x is always the global step (in Keras: the epoch, for
    values written once an epoch). A training that resumes from a checkpoint continues the curves: TensorBoard drops
    points written after the checkpoint.

    After each epoch the callback also writes `step/seconds` and values of the input pipeline:
    `input/batches_per_second`; `input/wait`, the share of time that training waited for input; `input/bottleneck`, the
    slowest stage. With `steps_per_execution` > 1 replicas draw their batches, and their waits are not measured. The
    text `failures` tells of lost replicas.

    Summaries that the module itself writes by `rd.summary` need a writer: `with writer.as_default(): model.fit(...)`.

    Args:
        log_dir: The directory.
        histogram_freq: Epochs between histograms of all parameters; 0: never.
        write_graph: Write the tree of the module's submodules, once.
        write_images: With the histograms, show two-dimensional parameters as pictures.
        write_steps_per_second: Write `epoch_steps_per_second`, and `batch_steps_per_second` if `update_freq` writes
            batches.
        update_freq: "epoch"; "batch"; or a number of global steps, after which the logs so far are written as
            `batch_loss` and so on. Reading the logs blocks until the dispatched steps are done.
        profile_batch: Must be 0: steps run in other processes.
        embeddings_freq: Epochs between writes of the weights of `torch.nn.Embedding` modules for the projector; 0:
            never.
        embeddings_metadata: A label for each row: one list for all of these modules, or a dict of lists by name.

    Raises:
        InvalidArgumentError: A number is negative, `update_freq` is invalid, `profile_batch` is not 0, or `log_dir` is
            a URI of another file system; (in `fit`) the directory cannot be written to.

    Source: keras.callbacks.TensorBoard.

    >>> import numpy as np, os, tempfile, torch
    >>> x = np.ones((4, 1), np.float32)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile("sgd", "mse")
    >>> folder = tempfile.mkdtemp()
    >>> history = model.fit(x, x, epochs=2, validation_data=(x, x), callbacks=[rd.TensorBoard(folder)], verbose=False)
    >>> sorted(os.listdir(folder))
    ['train', 'validation']
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: int = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        if not (update_freq in ("epoch", "batch") or (type(update_freq) is int and update_freq > 0)):
            raise InvalidArgumentError(
                f'update_freq must be "epoch", "batch" or a number of steps >= 1, got {update_freq!r}.'
            )
        if profile_batch:
            raise InvalidArgumentError(
                f"profile_batch must be 0, got {profile_batch!r}: steps run in other processes. Use fit(profile=...) "
                "or rd.profile_steps."
            )
        self._log_dir = Path(local_file(log_dir, "The directory of TensorBoard"))
        self._write_graph = write_graph
        self._write_steps_per_second = write_steps_per_second
        self._every = update_freq if isinstance(update_freq, int) else int(update_freq == "batch")
        self._parameters = ShownParameters(histogram_freq, write_images, embeddings_freq, embeddings_metadata)
        self._writers: dict[str, SummaryWriter] = {}
        self._purge_step: int | None = None
        self._train_step = self._epoch_began_at = 0
        self._data: DistributedDataset | None = None
        self._input: PipelineStats | None = None  # of the current epoch, once known
        self._clock = InputClock(time.perf_counter)
        self._num_failures = 0  # that were written

    def _set_data(self, data: DistributedDataset) -> None:
        self._data = data

    def _end_epoch(self) -> None:
        self._input = None if self._data is None else self._data.stats()

    def _global_step(self) -> int:
        return int(self.model.strategy._make_counter().value)

    def _writer(self, name: str) -> SummaryWriter:
        if name not in self._writers:
            self._writers[name] = create_file_writer(self._log_dir / name, purge_step=self._purge_step)
        return self._writers[name]

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Open the directory, and write the graph."""
        self._train_step = self._global_step()
        self._num_failures = len(self._failures())
        self._purge_step = self._train_step + 1 if self._train_step else None
        with self._writer("train").as_default():
            if self._write_graph:
                graph(self.model.module)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Start the clock of the epoch."""
        self._epoch_began_at = self._train_step = self._global_step()
        self._clock.begin()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Record that a batch was drawn."""
        self._clock.drawn()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Write the logs so far if `update_freq` asks for it."""
        before, self._train_step = self._train_step, self._epoch_began_at + batch + 1
        if self._every and before // self._every < self._train_step // self._every:
            with self._writer("train").as_default(self._train_step):
                _show_scalars("batch_", logs)
                if self._write_steps_per_second:
                    scalar("batch_steps_per_second", self._clock.steps_per_second(self._train_step - before))
        self._clock.dispatched()

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Write the logs of a validation at the training's current step."""
        if self._every and self._writers:
            with self._writer("validation").as_default(self._train_step):
                for name, value in _numbers(logs).items():
                    scalar(f"evaluation_{name}_vs_iterations", value)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write the logs, input and step times of an epoch, and parameters if due."""
        step = self._global_step()
        with self._writer("train").as_default(step):
            _show_scalars("epoch_", {name: value for name, value in logs.items() if not name.startswith("val_")})
            if logs:
                rates = rates_of(self.model.optimizer)
                scalar("epoch_learning_rate", rates[0])
            self._show_times(step - self._epoch_began_at)
            self._show_failures()
            self._parameters.show(self.model.module, epoch)
        validation = {name[4:]: value for name, value in logs.items() if name.startswith("val_")}
        if validation:
            with self._writer("validation").as_default(step):
                _show_scalars("epoch_", validation)
        self._train_step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the step at which the epoch began. Flush the files: a resumed training does not write again."""
        for writer in self._writers.values():
            with contextlib.suppress(FailedPreconditionError):  # a full disk: `on_train_end` reports it
                writer.flush()
        return {"epoch_began_at": self._epoch_began_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the step at which the epoch began."""
        self._epoch_began_at = state.get("epoch_began_at", self._epoch_began_at)

    def _show_times(self, steps: int) -> None:
        seconds = self._clock.seconds()
        if not steps or not seconds:
            return
        scalar("step/seconds", seconds / steps)
        if self._write_steps_per_second:
            scalar("epoch_steps_per_second", steps / seconds)
        scalar("input/wait", self._clock.waiting() / seconds)
        stats, self._input = self._input, None
        if stats is not None and stats.stages:
            scalar("input/batches_per_second", stats.elements / stats.elapsed_s if stats.elapsed_s else 0.0)
            text("input/bottleneck", stats.findings[0] if stats.bottleneck else "none")

    def _failures(self) -> list[ReplicaFailure]:
        strategy = self.model.strategy
        return strategy.failures() if isinstance(strategy, SynchronousStrategy) else []

    def _show_failures(self) -> None:
        failures = self._failures()
        new, self._num_failures = failures[self._num_failures :], len(failures)
        lines = [f"{each.reason}; {each.num_repeated} steps again, {each.seconds:.1f} s" for each in new]
        if lines:
            text("failures", "\n\n".join(lines))

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Close the files."""
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()


def _show_scalars(prefix: str, logs: Mapping[str, Any]) -> None:
    for name, value in _numbers(logs).items():
        scalar(prefix + name, value)


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
