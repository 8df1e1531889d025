"""The input pipeline as an actor on a local Ray: how data reach the readers, and failures on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from raydist.actors.epochs.input_pipeline_actors import InputPipelineActors
from raydist.core.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset, InputSide, ReplicaCount, distribute
from raydist.options import AutoShardPolicy, InputOptions, Options, Timeouts
from tests.conftest import live_actors
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

Distribute = Callable[..., DistributedDataset]


@pytest.fixture(scope="module")
def shared_host(ray_cluster: None) -> Iterator[InputPipelineActors]:
    """For the tests that leave it as it is."""
    host = InputPipelineActors("shared", num_replicas=4, timeouts=Timeouts(poll_s=1.0))
    yield host
    host.close()


@pytest.fixture
def hosts() -> Iterator[list[InputPipelineActors]]:
    """Hosts of one test."""
    hosts: list[InputPipelineActors] = []
    yield hosts
    for host in hosts:
        host.close()


@pytest.fixture
def distributed(shared_host: InputPipelineActors, shared_actors: set[str]) -> Iterator[Distribute]:
    """Distributes a dataset through the shared host, or another one: `distributed(dataset, replicas=2, workers=0)`."""

    def make(
        dataset: Dataset,
        host: InputPipelineActors = shared_host,
        *,
        replicas: int = 2,
        num_workers: int = 1,
        workers: int = 0,
        **options: Any,
    ) -> DistributedDataset:
        side = InputSide(host, ReplicaCount(replicas, num_workers), host._timeouts, drain=lambda: None)
        return distribute(dataset, side, InputOptions(num_input_workers=workers, **options))

    yield make
    shared_actors |= {name for name in live_actors() if name.startswith(("InputPipeline", "InputWorker"))}


def lists(batch: Any) -> list[Any]:
    return [value.tolist() for value in batch.values]


def test_steps_reach_the_driver_whatever_makes_them_and_resume_on_others(distributed: Distribute) -> None:
    def augment(x: Any, *, rng: np.random.Generator) -> Any:
        return x * 1000 + rng.integers(1000)

    dataset = Dataset.range(40).shuffle(10, seed=2).map(augment).batch(6).with_options(Options(seed=1))
    plain = [batch.tolist() for batch in dataset]
    state: Any = None
    for workers, replicas in ((0, 2), (1, 1), (2, 3)):
        view = distributed(dataset, replicas=replicas, workers=workers)
        first = [lists(batch) for batch in view]
        assert [[row for part in step for row in part] for step in first] == plain
        assert [len(step) for step in first] == [replicas] * 7
        resumed = iter(view)  # another epoch
        if state is None:
            assert [lists(next(resumed)) for _ in range(3)] != first[:3]
            state = resumed.state_dict()
            rest = [row for batch in resumed for part in lists(batch) for row in part]
        else:
            resumed.load_state_dict(state)
            assert [row for batch in resumed for part in lists(batch) for row in part] == rest
    assert len(rest) == 40 - 3 * 6


def test_pieces_are_mapped_not_copied(distributed: Distribute) -> None:
    big = Dataset.from_tensor_slices(np.ones((4, 1_000_000), np.float32)).batch(4)
    (batch,) = distributed(big, zero_copy=True)
    ref = batch.part_on(0).ref
    first, second = ray.get(ref), ray.get(ref)
    assert first.array(0).ctypes.data == second.array(0).ctypes.data  # both are the store's memory
    assert not first.array(0).flags.owndata
    assert not first.array(0).flags.writeable
    assert first.leaf(0).data_ptr() == first.array(0).ctypes.data
    (private,) = distributed(big)
    value = private.values[0]
    value += 1
    assert float(ray.get(private.part_on(0).ref).array(0).max()) == 1.0


def test_steps_that_are_ahead_lie_in_one_record_batch(distributed: Distribute) -> None:
    images = np.arange(64 * 100 * 400, dtype=np.float32).reshape(64 * 100, 400)
    iterator = iter(distributed(Dataset.from_tensor_slices((images, np.arange(64 * 100))).batch(128)))
    batches = [next(iterator)]
    while not batches[-1][0].part_on(0).place:  # the first ones go alone
        batches.append(next(iterator))
    before, last = batches[-2:]
    assert before[0].part_on(0).ref == last[0].part_on(0).ref
    piece = ray.get(last[0].part_on(0).ref)
    kinds = [field.type for field in piece.batch.schema]
    assert isinstance(kinds[0], pa.FixedShapeTensorType)
    assert pa.types.is_int64(kinds[1])
    place = last[0].part_on(0).place
    rows = piece.batch.column(1).to_pylist()
    assert rows[64 * place : 64 * place + 64] == last[1].values[0].tolist()
    assert not piece.array(0, place).flags.writeable
    step = last[0].drawn.batch.step
    assert last[0].values[0].tolist() == images[128 * step : 128 * step + 64].tolist()
    del iterator, batches
    assert before[0].values[1].tolist() == images[128 * (step - 1) + 64 : 128 * step].tolist(), (
        "kept while it is in use"
    )


def names_of(host: InputPipelineActors) -> list[str]:
    """Return the names of the host's actors, the main one first."""
    return [hosted.name for hosted in host._hosted.values()]


def pids_of_workers(host: InputPipelineActors) -> list[int]:
    (pipeline,) = names_of(host)
    names = [name for name in ray.util.list_named_actors() if name.startswith(pipeline) and "-worker-" in name]
    actors: list[Any] = [ray.get_actor(name) for name in names]
    return [ray.get(actor.hello.remote(), timeout=30) for actor in actors]


def test_a_killed_pipeline_is_named_and_the_next_epoch_gets_a_new_one(
    distributed: Distribute, hosts: list[InputPipelineActors]
) -> None:
    hosts.append(InputPipelineActors("killed", num_replicas=2, timeouts=Timeouts(poll_s=1.0)))
    iterator = iter(distributed(Dataset.range(10_000).batch(2), hosts[0]))
    state = iterator.state_dict()
    next(iterator)
    (name,) = names_of(hosts[0])
    ray.kill(ray.get_actor(name), no_restart=True)
    with pytest.raises(UnavailableError, match=name):
        list(iterator)
    iterator.load_state_dict(state)
    assert lists(next(iterator)) == [[0], [1]]


def test_a_reader_waits_until_the_limit_of_the_input_or_the_end_of_its_iterator(
    distributed: Distribute, hosts: list[InputPipelineActors]
) -> None:
    hosts.append(InputPipelineActors("stuck", num_replicas=2, timeouts=Timeouts(poll_s=0.2, input_s=1.0)))
    stuck = Dataset.range(1).map(lambda x: time.sleep(60)).batch(1)
    with pytest.raises(DeadlineExceededError, match=r"Timeouts\.input_s"):
        next(iter(distributed(stuck, hosts[0])))
    iterator: Any = iter(distributed(stuck, hosts[0], workers=1))
    iterator.state_dict()  # opens the epoch
    timer = threading.Timer(0.5, iterator.close)
    timer.start()
    with pytest.raises(CancelledError, match="closed"):
        next(iterator)
    timer.join()


def is_open(link: Any) -> bool:
    try:
        link.call("num_kept")
    except CancelledError:
        return False
    return True


def test_an_abandoned_iterator_ends_its_epoch_and_the_next_one_uses_its_workers(
    distributed: Distribute, hosts: list[InputPipelineActors]
) -> None:
    hosts.append(InputPipelineActors("abandoned", num_replicas=2, timeouts=Timeouts(poll_s=1.0)))
    view = distributed(Dataset.range(100_000).map(lambda x: x).batch(4), hosts[0], workers=1)
    iterator: Any = iter(view)
    next(iterator)
    link, workers = iterator._epoch.link, pids_of_workers(hosts[0])
    assert len(workers) == 1
    del iterator
    wait_until(lambda: not is_open(link))
    next(iter(view))
    assert pids_of_workers(hosts[0]) == workers


# --- one actor for all workers, or one on the node of each worker -----------------------------------------------------


def every_worker_reads(size: int) -> Dataset:
    return Dataset.range(size).batch(4).with_options(Options(auto_shard_policy=AutoShardPolicy.OFF))


def test_a_worker_on_a_node_of_its_own_has_an_actor_there(
    distributed: Distribute, hosts: list[InputPipelineActors]
) -> None:
    here = ray.get_runtime_context().get_node_id()
    limits = Timeouts(poll_s=5.0)
    hosts.append(InputPipelineActors("test", num_replicas=4, timeouts=limits, worker_nodes=lambda: (here, None)))
    view = distributed(every_worker_reads(30), hosts[0], replicas=4, num_workers=2)
    iterator = iter(view)
    assert lists(next(iterator)) == [[0], [1], [0], [1]]
    _, ours = names_of(hosts[0])
    ray.kill(ray.get_actor(ours), no_restart=True)
    with pytest.raises(UnavailableError, match=ours) as caught:
        list(iterator)
    assert any("It made the batches of worker 0 of 2." in note for note in caught.value.__notes__)
    assert len(list(view)) == 15  # with new actors
