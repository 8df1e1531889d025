"""The InputPipeline actor: hosts the passes over distributed datasets, and owns the pieces that they store."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, final

import ray

from raydist.actors.batch_queues import Place
from raydist.actors.portable_errors import pack_error
from raydist.actors.production import Poll, Production
from raydist.errors import CancelledError, RaydistError
from raydist.pipelines.iterator import DatasetIterator
from raydist.pipelines.steps import DealtElements, GlobalBatches, StepSource, elements

if TYPE_CHECKING:
    from raydist.actors.batch_queues import Position
    from raydist.actors.input_job import InputJob

__all__ = ["InputPipeline"]


@final
class InputPipeline:
    """Runs inside an actor; one thread per pass, and Ray's threads for the calls below."""

    def __init__(self) -> None:
        self._productions: dict[str, Production] = {}

    def open(self, key: str, job: InputJob) -> None:
        """Begin a pass. Its errors (a missing file, say) are those of the caller."""
        production = Production(
            _step_source(job),
            ray.put,
            num_replicas=job.num_replicas,
            capacity=job.capacity,
            zero_copy=job.input_options.zero_copy,
            label=job.label,
        )
        self._productions[key] = production
        production.start()

    def _production(self, key: str) -> Production:
        try:
            return self._productions[key]
        except KeyError:
            raise CancelledError("This iterator was closed (with its strategy, or by close()).") from None

    def poll(self, key: str, poll: Poll) -> tuple[Place, ...]:
        """See `Production.poll`. A pass that was closed answers with that error as its last place."""
        try:
            return self._production(key).poll(poll)
        except (
            RaydistError
        ) as error:  # as a value: an answer that nobody waits for any more must not be logged as a failure
            return (Place(poll.start, {}, error=pack_error(error), last=True),)

    def release(self, key: str, rank: int | None, done: int) -> None:
        """See `Production.release`."""
        self._production(key).release(rank, done)

    def position_of(self, key: str, rank: int) -> int:
        """See `Production.position_of`."""
        return self._production(key).position_of(rank)

    def reclaim(self, key: str) -> Position:
        """See `Production.reclaim`."""
        return self._production(key).reclaim()

    def num_kept(self, key: str) -> int:
        """See `Production.num_kept`."""
        return self._production(key).num_kept()

    def close(self, key: str, timeout_s: float) -> bool:
        """End a pass; False if its thread is still busy after `timeout_s`. A pass that is gone is closed already."""
        production = self._productions.pop(key, None)
        if production is None:
            return True
        production.close()
        return production.join(timeout_s)

    def open_passes(self) -> list[str]:
        """Keys of the passes that are open."""
        return list(self._productions)


def _step_source(job: InputJob) -> StepSource:
    iterators = [
        DatasetIterator(op, options=job.options, seed=job.seed, epoch=job.epoch, convert=elements)
        for op in pickle.loads(job.ops)
    ]
    source: StepSource
    if job.dealt:
        source = DealtElements(iterators, job.num_replicas)
    else:
        source = GlobalBatches(iterators[0], job.num_replicas, job.input_options.split)
    if job.state is not None:
        source.load_state_dict(job.state)
    return source
