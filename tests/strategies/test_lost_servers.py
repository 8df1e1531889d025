"""Parameter servers that are killed: all servers go back to the last checkpoint, and training goes on from there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import raydist as rd
from raydist.actors.parameter_servers import ServerActors
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


class Net(nn.Module):
    """A variable in two parts, a small one, a buffer, and a table of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.table = rd.ShardedEmbedding(1000, 8, seed=1)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.first(x)) + self.table(rows)
        return found


class Program:
    """A model with its optimizer and counter on servers, and a manager that saves them."""

    def __init__(self, strategy: rd.ParameterServerStrategy, folder: Path, *, saves: bool = True) -> None:
        with strategy.scope():
            torch.manual_seed(0)
            self.model = Net()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
            self.steps = rd.get_global_step()
        self.strategy, self.progress = strategy, rd.State(rounds=0)
        optimizer: Any = {"optimizer": self.optimizer} if saves else {}
        checkpoint = rd.Checkpoint(model=self.model, progress=self.progress, **optimizer)
        self.manager = rd.CheckpointManager(checkpoint, folder, 1, step_counter=self.steps)
        self.coordinator = rd.ClusterCoordinator(strategy)

    def train(self, numbers: Sequence[int], between: Callable[[int], object] = lambda number: None) -> None:
        """Train on these batches; `between` is called before each update. Every result can be read."""
        model, optimizer, steps = self.model, self.optimizer, self.steps

        def step(number: int) -> int:
            torch.manual_seed(number)
            optimizer.zero_grad()
            model(torch.randn(6, 4), torch.randint(0, 1000, (6,))).square().mean().backward()
            between(number)
            optimizer.step()
            steps.add_(1)
            return number

        values = [self.coordinator.schedule(step, args=(number,)) for number in numbers]
        self.coordinator.join()
        assert self.coordinator.fetch(values) == list(numbers)

    def state(self) -> dict[str, Any]:
        """Everything that the servers have."""
        tensors = {**self.model.state_dict(), "steps": self.steps}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"{name}.{key}": each for key, each in self.optimizer.state[parameter].items()}
        parts = [(part["rows"].tolist(), part["values"].tolist()) for part in self.model.table.export_rows()]
        rows = [sorted(zip(*part, strict=True)) for part in parts]
        return {**{name: each.detach().clone() for name, each in tensors.items()}, "rows": rows}

    def save(self) -> dict[str, Any]:
        self.manager.save()
        self.manager.sync()
        return self.state()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


def pids_of(strategy: rd.ParameterServerStrategy) -> list[int]:
    """The process of each server, in order."""
    assert strategy._cluster.launched is not None
    handles = strategy._cluster.launched._servers._handles
    return [ray.get(handle.__ray_call__.remote(lambda host: os.getpid()), timeout=20) for handle in handles]


class KillOnce:
    """Kills a process when a closure gets this number, the first time that it runs."""

    def __init__(self, number: int, pid: int, folder: Path) -> None:
        self.number, self.pid, self.mark = number, pid, folder / f"killed-{number}"

    def __call__(self, number: int) -> None:
        if number == self.number and not self.mark.exists():
            self.mark.touch()
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(FileNotFoundError):  # Ray has noticed the end
                wait_until(lambda: ") Z " in Path(f"/proc/{self.pid}/stat").read_text())


def started(num_workers: int, num_ps: int, **options: Any) -> rd.ParameterServerStrategy:
    share = {"CPU": 0.01, "session": 0.01}
    return rd.ParameterServerStrategy(
        num_workers,
        num_ps,
        rd.FixedShardsPartitioner(2),
        resources_per_server=share,
        resources_per_replica=share,
        timeouts=rd.Timeouts(start_s=60, collective_s=30, step_s=60, input_s=30, close_s=5),
        **options,
    )


@pytest.mark.long
def test_all_servers_go_back_to_the_checkpoint_and_what_had_not_ended_runs_again(
    ray_cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(1, 2) as strategy:
        program = Program(strategy, tmp_path / "run")
        program.train(range(5))
        first = program.save()
        program.train(range(5, 8))
        program.progress.rounds = 1
        pids = pids_of(strategy)
        with caplog.at_level(logging.WARNING, "raydist"):
            os.kill(pids[1], signal.SIGKILL)
            assert_same(program.state(), first)  # a read of the driver finds the loss
        (record,) = caplog.records
        assert re.search(r"parameter server 1 .* is gone: .* values of .*ckpt-5.* are lost", record.getMessage())
        assert program.progress.rounds == 1, "what only the driver has stays"
        assert not set(pids) & set(pids_of(strategy))

        program.train(range(8, 20), KillOnce(14, pids_of(strategy)[0], tmp_path))  # beside closures that run and wait
        disturbed = program.save()
        assert disturbed["steps"] == 5 + 6, "from 14 on"
        program.manager.restore_or_initialize()
        assert_same(program.state(), disturbed)
        assert [Path(each).name for each in program.manager.checkpoints] == ["ckpt-11"]
        program.manager.close()


@pytest.mark.long
def test_steps_of_several_workers_go_on_after_two_losses_at_a_time(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that wait for the gradients of others are not left waiting; a new server that dies is replaced again."""
    restart, restarted = ServerActors.restart, []

    def restart_and_kill(actors: ServerActors, within_s: float) -> None:
        restart(actors, within_s)
        restarted.append(1)
        if len(restarted) == 1:
            ray.kill(actors._handles[1])

    monkeypatch.setattr(ServerActors, "restart", restart_and_kill)
    with started(2, 2, consistency=rd.SyncWithBackups(0)) as strategy:
        program = Program(strategy, tmp_path / "run")
        program.train(range(4))
        first = program.save()
        program.train(range(4, 12), KillOnce(6, pids_of(strategy)[1], tmp_path))
        assert len(restarted) == 2
        assert 5 <= program.steps <= 12
        assert not torch.equal(program.model.first.weight, first["first.weight"])
        assert all(each.isfinite().all() for each in program.model.state_dict().values())
        program.manager.close()


def fails(program: Program, note: str) -> None:
    """Training raises what names the server, and says why it is not replaced; a note "" is none."""
    with pytest.raises(rd.UnavailableError, match=r"parameter server 0 .* restore from your last") as caught:
        program.train(range(2, 6))
    told = "".join(getattr(caught.value, "__notes__", ()))
    assert re.search(note, told) if note else "checkpoint" not in told, told


def end(program: Program) -> None:
    program.manager.close()
    with contextlib.suppress(rd.UnavailableError):
        program.strategy.close()


def test_without_a_checkpoint_a_lost_server_is_an_error(ray_cluster: None, tmp_path: Path) -> None:
    program = Program(started(1, 1), tmp_path / "run")
    program.train(range(2))
    weight = program.model.first.weight
    os.kill(pids_of(program.strategy)[0], signal.SIGKILL)
    fails(program, r"no rd\.CheckpointManager with the variables of this strategy is watching")
    program.manager.watch()
    fails(program, r"has not saved a checkpoint yet")
    with pytest.raises(rd.UnavailableError, match="parameter server 0"):  # its own error: it was not cancelled
        program.coordinator.schedule(lambda: weight.sum()).get()
    end(program)


@pytest.mark.parametrize(
    ("options", "saves", "notes"),
    [
        (rd.FailureOptions(), False, [r"the checkpoint lacks Adam", ""]),
        pytest.param(rd.FailureOptions(recover=False), True, ["", ""], marks=pytest.mark.long),
        pytest.param(rd.FailureOptions(max_failures=0), True, [r"lost 1 times within 3600 s"], marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_in_part_and_limits(
    ray_cluster: None, tmp_path: Path, options: rd.FailureOptions, saves: bool, notes: list[str]
) -> None:
    """Where a recovery fails, servers with other values than those of the checkpoint answer nobody."""
    program = Program(started(1, 1, failure_options=options), tmp_path / "run", saves=saves)
    program.train(range(2))
    program.save()
    os.kill(pids_of(program.strategy)[0], signal.SIGKILL)
    for note in notes:
        fails(program, note)
    end(program)
