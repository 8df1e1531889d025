"""The actors of a strategy's input, on a local Ray: one for datasets of all, and one on each node of workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from raydist.actors.epochs.input_host import InputHost
from raydist.core.errors import UnavailableError
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, distribute
from raydist.options import AutoShardPolicy, InputOptions, Options, Timeouts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

OPTIONS = InputOptions(num_input_workers=0)
LIMITS = Timeouts(poll_s=5.0)


@pytest.fixture
def hosts() -> Iterator[list[InputHost]]:
    hosts: list[InputHost] = []
    yield hosts
    for host in hosts:
        host.close()


def lists(batch: Any) -> list[Any]:
    return [value.tolist() for value in batch.values]


def every_worker_reads(host: InputHost, size: int) -> Any:
    """Batches of 4 rows for two workers of two replicas."""
    side = InputSide(host, 4, LIMITS, drain=lambda: None, num_workers=2)
    batches = Dataset.range(size).batch(4).with_options(Options(auto_shard_policy=AutoShardPolicy.OFF))
    return distribute(batches, side, OPTIONS)


def test_workers_on_one_node_share_an_actor(hosts: list[InputHost]) -> None:
    hosts.append(InputHost("test", num_replicas=4, timeouts=LIMITS))
    view = every_worker_reads(hosts[0], 6)
    for _ in range(2):
        assert [lists(batch) for batch in view] == [
            [[0], [1], [0], [1]],
            [[2], [3], [2], [3]],
            [[4], [5], [4], [5]],
        ]
    assert len(hosts[0].actor_names) == 1


def test_a_worker_on_a_node_of_its_own_has_an_actor_there(hosts: list[InputHost]) -> None:
    here = ray.get_runtime_context().get_node_id()
    hosts.append(InputHost("test", num_replicas=4, timeouts=LIMITS, worker_nodes=lambda: (here, None)))
    view = every_worker_reads(hosts[0], 30)
    iterator = iter(view)
    assert lists(next(iterator)) == [[0], [1], [0], [1]]
    main, ours = hosts[0].actor_names
    assert main == hosts[0].actor_name
    ray.kill(ray.get_actor(ours), no_restart=True)
    with pytest.raises(UnavailableError, match=ours) as caught:
        for _ in iterator:
            pass
    assert any("It made the batches of worker 0 of 2." in note for note in caught.value.__notes__)
    assert len(list(view)) == 15  # with new actors


def test_a_host_closes_twice_and_never_started(hosts: list[InputHost]) -> None:
    host = InputHost("test", num_replicas=1, timeouts=Timeouts())
    host.close()
    host.start()
    host.close()
    host.close()
    assert host.actor_name.startswith("test-input-")
