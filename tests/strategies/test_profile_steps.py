"""Traces of steps: one file with the operators of all replicas."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import raydist as rd


def processes(path: Path, operator: str) -> Counter[str]:
    """How often an operator runs in each process of a trace, by the names of processes."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"].split(":")[0] for event in events if event["name"] == "process_name"}
    return Counter(names[event["pid"]] for event in events if event["name"] == operator)


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_each_replica_is_in_the_trace_with_the_steps_of_the_block(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    x = torch.ones(20, 4)
    with two.scope():
        net = torch.nn.Linear(4, 1)
        model = rd.Model(net)
        model.compile("sgd", "mse")

    def step() -> None:
        net(torch.ones(2, 4))

    two.run(step)
    with rd.profile_steps(two, tmp_path / "new" / "trace.json.gz"):
        for _ in range(3):
            two.run(step)
    two.run(step)
    assert processes(tmp_path / "new" / "trace.json.gz", "aten::addmm") == {"replica 0": 3, "replica 1": 3}
    model.fit(x, x[:, :1], batch_size=2, epochs=2, profile=tmp_path, verbose=False)
    assert processes(tmp_path / "trace.json.gz", "aten::addmm") == {"replica 0": 5, "replica 1": 5}


def test_a_failed_block_writes_its_trace_and_keeps_its_error(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    path = tmp_path / "trace.json.gz"
    with pytest.raises(ZeroDivisionError), rd.profile_steps(strategy, path, with_stack=True):
        strategy.run(lambda: torch.ones(2, 2).mm(torch.ones(2, 2)) / (1 // 0))
    assert processes(path, "aten::mm") == {"replica 0": 1}


def test_a_fit_that_is_short_or_fails_is_recorded_as_far_as_it_goes_and_no_further(tmp_path: Path) -> None:
    class Fails(rd.Callback):
        def on_train_batch_end(self, batch: int, logs: object) -> None:
            if batch == 4:
                raise ZeroDivisionError

    with rd.OneDeviceStrategy("cpu").scope():
        model = rd.Model(torch.nn.Linear(4, 1))
        model.compile("sgd", "mse")
    x = torch.ones(20, 4)
    with pytest.raises(ZeroDivisionError):
        model.fit(x, x[:, :1], batch_size=2, profile=tmp_path, callbacks=[Fails()], verbose=False)
    assert processes(tmp_path / "trace.json.gz", "aten::addmm") == {"replica 0": 2}
    for num_rows, recorded in ((20, 5), (10, 2)):  # no recording is under way
        model.fit(x[:num_rows], x[:num_rows, :1], batch_size=2, profile=tmp_path, verbose=False)
        assert processes(tmp_path / "trace.json.gz", "aten::addmm") == {"replica 0": recorded}


def test_workers_of_parameter_servers_are_refused() -> None:
    strategy = rd.ParameterServerStrategy.__new__(rd.ParameterServerStrategy)
    with pytest.raises(rd.InvalidArgumentError, match="needs a strategy whose replicas run the same steps"):
        rd.profile_steps(strategy, "unused").__enter__()
