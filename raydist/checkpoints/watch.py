"""A manager's `StepWatcher`: records positions of datasets at step boundaries, and saves before preemption."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, final

from raydist.checkpoints.checkpoint import nodes_of
from raydist.checkpoints.contents import CheckpointContents
from raydist.checkpoints.saves import ManagerSaves
from raydist.cluster.preemption import Positions
from raydist.cluster.ray_session import this_node
from raydist.core.errors import Preempted
from raydist.distributed_dataset import DistributedDataset, DistributedIterator
from raydist.distributed_dataset.base import is_lent
from raydist.pipelines.formats.files import shown_uri
from raydist.pipelines.run.iterator import DatasetIterator


@final
class _TrackedIterator:
    """An iterator that is itself an object of the checkpoint, with its positions at step boundaries."""

    def __init__(self, iterator: DistributedIterator | DatasetIterator[Any]) -> None:
        self._iterator: weakref.ref[Any] = weakref.ref(iterator)
        self._begin = None if iterator.has_ended else iterator.state_dict()
        self._positions = Positions()

    def mark(self, boundary: int) -> None:
        iterator = self._iterator()
        self._positions.note(boundary, None if iterator is None else iterator._place())

    @property
    def first_undoable(self) -> int:
        return (self._positions.first or 0) + 1 if self._positions.num_forgotten else 0

    def state(self, undone: int) -> Any:
        """Return the iterator's state before the step of this boundary; None for its current state."""
        iterator = self._iterator()
        if iterator is None or (iterator.has_ended and undone > self._positions.last_change):
            return None
        place = self._positions.before(undone)
        if place is None:
            return None if is_lent(iterator) else self._begin
        return iterator._state_at(place)


@final
class ManagerWatch:
    """A manager's `StepWatcher`. Holds weak references only, so that a dropped manager is no longer notified."""

    def __init__(self, saves: ManagerSaves, exit_code: int, *, asynchronous: bool = True) -> None:
        self._saves = weakref.ref(saves)
        self.key = uuid.uuid4().hex[:12]
        """Key of the manager, unique in this process."""
        self.exit_code, self.asynchronous = exit_code, asynchronous
        self._settle: Callable[[], None] | None = None
        self._preemption: Callable[[], Preempted | None] = lambda: None
        self._datasets: list[weakref.ref[DistributedDataset]] = []
        self._iterators: dict[str, _TrackedIterator] = {}

    def look(self) -> None:
        """Record the datasets and iterators that the checkpoint has now, and their positions."""
        saves = self._saves()
        named = {} if saves is None else saves.contents.named()
        self._datasets = [weakref.ref(each) for each in named.values() if isinstance(each, DistributedDataset)]
        self._iterators = {
            name: _TrackedIterator(each)
            for name, each in named.items()
            if isinstance(each, DistributedIterator | DatasetIterator)
        }

    @property
    def saves(self) -> ManagerSaves | None:
        """Saves of the manager; None if the manager was dropped."""
        return self._saves()

    def follow(self, settle: Callable[[], None], preemption: Callable[[], Preempted | None]) -> None:
        """Record a run that draws batches itself.

        `settle` blocks until the run and its saves have ended, and raises the run's error; `preemption` returns the
        exception that ends the process, once the save for it is written.
        """
        self._settle, self._preemption = settle, preemption

    def settle(self) -> None:
        """Block until the recorded run has ended, so that its saves are known; raise the run's error."""
        if self._settle is not None:
            self._settle()
            self._settle, self._preemption = None, lambda: None

    def before_step(self, boundary: int) -> None:
        for ref in self._datasets:
            dataset = ref()
            if dataset is not None:
                dataset._epochs.mark(boundary)
        for iterator in self._iterators.values():
            iterator.mark(boundary)

    @property
    def first_undoable(self) -> int:
        datasets = [dataset for ref in self._datasets if (dataset := ref()) is not None]
        firsts = [dataset._epochs.first_undoable for dataset in datasets]
        return max([*firsts, *(each.first_undoable for each in self._iterators.values())], default=0)

    def save_before_exit(self, reason: str, *, undone: int | None) -> Preempted:
        saves, preemption = self._saves(), self._preemption
        why = f"This process is to end: {reason}."
        try:
            self.settle()
        except Preempted:
            pass  # the replicas have stopped already
        except Exception as error:
            if saves is not None and preemption() is None:
                return Preempted(self.exit_code, why + unsaved(saves, error))
        if (end := preemption()) is not None:
            return end
        if saves is not None:
            given = {} if undone is None else {name: each.state(undone) for name, each in self._iterators.items()}
            with saves.contents.overriding({name: state for name, state in given.items() if state is not None}):
                why += _saved(saves, undone)
        return Preempted(self.exit_code, why)

    def nodes(self) -> Collection[str]:
        saves = self._saves()
        return set() if saves is None else {this_node()} | nodes_of(saves.contents)


def _saved(saves: ManagerSaves, undone: int | None) -> str:
    """Save the current progress; return the sentence about it for the message."""
    saves.writer.join_silently()  # three failures in a row do not prevent one more attempt
    try:
        with contextlib.nullcontext() if undone is None else _as_before_draw(saves.contents, undone):
            handle = saves.save(saves.step(), None, here=True)
        handle.wait()
    except Exception as error:
        return unsaved(saves, error)
    return f" What it reached is in {shown_uri(handle.path)!r}."


def unsaved(saves: ManagerSaves, error: Exception) -> str:
    """Return the sentence for a process that ends without a last save."""
    found = saves.run.newest() if saves.run.is_acquired else []
    latest = shown_uri(found[-1]) if found else "none"
    return f" It could not be saved ({type(error).__name__}: {error!s:.300}); the last checkpoint is {latest}."


@contextlib.contextmanager
def _as_before_draw(contents: CheckpointContents, undone: int) -> Iterator[None]:
    """Put datasets back to their positions before the last step that began before this boundary."""
    with contextlib.ExitStack() as stack:
        for each in contents.named().values():
            if isinstance(each, DistributedDataset):
                stack.enter_context(each._epochs.before_draw(undone))
        yield
