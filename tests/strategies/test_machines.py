"""Two machines, as far as one can play two: networks, processes and shared memory apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import await_line, two_machines, unplug
from tests.ray_head import RAY

pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]

HEAD = f"""
{RAY} start --head --node-ip-address=10.219.0.1 --port=6379 --num-cpus=1 --include-dashboard=false \\
  --object-store-memory=100000000 --system-config='{{"health_check_initial_delay_ms": 1000,
  "health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}}'
echo up
RAY_ADDRESS=10.219.0.1:6379 {sys.executable} -u -c 'from tests.strategies.test_machines import drive; drive()'
"""
OTHER = f"""
{RAY} start --address=10.219.0.1:6379 --node-ip-address=10.219.0.2 --num-cpus=1 --object-store-memory=100000000 --block
"""


def drive() -> None:
    """The program, on the first machine."""
    import logging
    import time

    import ray
    import torch

    import raydist as rd
    from raydist.testing.strategy_contract import check_training, check_values

    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    while len([node for node in ray.nodes() if node["Alive"]]) < 2:
        time.sleep(0.1)
    limits = rd.Timeouts(start_s=60, collective_s=20, step_s=60, input_s=30, close_s=5)
    strategy = rd.MultiWorkerMirroredStrategy(timeouts=limits)
    assert strategy.cluster_resolver.cluster_spec().as_dict()["worker"] in (
        ["10.219.0.1", "10.219.0.2"],
        ["10.219.0.2", "10.219.0.1"],
    )
    check_training(strategy)
    check_values(strategy)

    def total(x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = rd.get_replica_context().all_reduce("SUM", x)
        return value

    value = strategy.distribute_values_from_function(lambda context: torch.ones(2))
    assert strategy.reduce("MEAN", strategy.run(total, args=(value,)), axis=None).tolist() == [2.0, 2.0]
    print("trained", flush=True)
    try:
        while True:
            strategy.local_results(strategy.run(total, args=(value,)))
    except (rd.UnavailableError, rd.DeadlineExceededError) as error:
        began = time.monotonic()
        print(type(error).__name__, error, *getattr(error, "__notes__", ()), flush=True)
    strategy._abort(fetch=True)
    with rd.MultiWorkerMirroredStrategy(timeouts=limits) as rest:
        assert rest.num_replicas_in_sync == 1
        check_training(rest)
    print(f"went on {time.monotonic() - began:.1f}", flush=True)


@pytest.mark.long
def test_training_on_two_machines_and_what_a_pulled_cable_does(tmp_path: Path) -> None:
    log, other_log = tmp_path / "first", tmp_path / "second"
    running: list[subprocess.Popen[bytes]] = []
    with two_machines() as (first, second):
        try:
            running.append(first.start(HEAD, log))
            await_line(log, "up", running[0], within_s=60)
            running.append(second.start(OTHER, other_log))
            await_line(log, "trained", running[0], within_s=90)
            unplug(second)
            assert running[0].wait(60) == 0, log.read_text()
        finally:
            for process in running:
                process.kill()
                process.wait()
    said = [line for line in log.read_text().splitlines() if line.startswith(("UnavailableError", "DeadlineExceeded"))]
    assert len(said) == 1, log.read_text()
    assert "of multi-worker-" in said[0]
    assert "on node 10.219.0.2 (" in said[0], said[0]
