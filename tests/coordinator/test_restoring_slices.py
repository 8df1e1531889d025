"""Servers read the slices that they restore, and what optimizers remember of them; the driver reads no tensor."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints import contents, read_tensors
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.sharing import started_save
from raydist.checkpoints.sharing.part_reader import PartReader
from raydist.coordinator.restoring import ServedRestorer
from raydist.parameter_servers.consistency import BoundedStaleness, SyncWithBackups
from raydist.parameter_servers.partitioners import FixedShardsPartitioner
from raydist.pipelines.stored.directory_files import directory_files
from tests.coordinator.served_here import Served, served
from tests.coordinator.test_saving import opened

SERVER = "raydist-restore"

Kind = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, betas=(0.8, 0.99), amsgrad=True)


class Net(nn.Module):
    """With all that servers may have: rows, buffers, a scalar, one variable under two names, none without elements."""

    empty: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.norm = nn.BatchNorm1d(7)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.second = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.second.weight
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.second(self.norm(self.first(x)) * self.factor).tanh())
        return out


class Steps(nn.Module):
    """Counts steps."""

    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))


def batch(number: int) -> torch.Tensor:
    return torch.sin(torch.arange(32.0) + number).reshape(8, 4)


class Run:
    """A program on servers, or alone."""

    def __init__(self, kind: Kind = adam, here: Served | None = None, monkeypatch: Any = None, seed: int = 1) -> None:
        self.here = here
        torch.manual_seed(seed)
        if here is None:
            self._make(kind)
        else:
            with here.mirror.scope():
                self._make(kind)
            monkeypatch.setattr(contents, "open_strategies", lambda: [self])

    def _make(self, kind: Kind) -> None:
        self.model, self.steps = Net(), Steps()
        self.optimizer = kind(self.model.parameters())
        self.checkpoint = rd.Checkpoint(model=self.model, optimizer=self.optimizer, steps=self.steps)

    def _find_restorer(self) -> Any:
        return None if self.here is None else self.here.restorer

    def train(self, numbers: range) -> None:
        model, optimizer, steps = self.model, self.optimizer, self.steps

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps.value += 1

        for number in numbers:
            if self.here is None:
                step(batch(number))
            else:
                self.here.schedule(step, batch(number))

    def state(self) -> dict[str, Any]:
        """All of it, copied."""
        if self.here is not None:
            self.here.coordinator.join()
        found: dict[str, Any] = {
            "model": {key: value.detach().clone() for key, value in self.model.state_dict().items()},
            "steps": int(self.steps.value),
            **self.optimizer.state_dict(),
        }
        found["param_groups"] = [{**group, "fused": None} for group in found["param_groups"]]
        return found


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def driver_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the driver restores everything."""
    with monkeypatch.context() as patch:
        patch.setattr(ServedRestorer, "can_restore", lambda self, obj: False)
        yield


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str, bool]]:
    """Bytes that were read: by file, by what it was, and whether a server read them."""
    found: Counter[tuple[str, str, bool]] = Counter()
    original = read_tensors._FileReader._some

    def some(self: Any, size: int, what: str) -> bytes:
        piece = original(self, size, what)
        found[Path(self._path).name, what, threading.current_thread().name == SERVER] += len(piece)
        return piece

    monkeypatch.setattr(read_tensors._FileReader, "_some", some)
    return found


Saved = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Saves a run of three steps on so many servers, or alone; says where, and its state."""
    monkeypatch.setattr(started_save, "UNDIVIDED_BYTES", 0)

    def save(kind: Kind = adam, num_servers: int | None = None, parts: int = 1) -> tuple[Path, dict[str, Any]]:
        path = tmp_path / "c"
        if num_servers is None:
            run = Run(kind)
            run.train(range(3))
            run.checkpoint.save(path)
            return path, run.state()
        with served(1, num_servers, partitioner=FixedShardsPartitioner(parts)) as here:
            run = Run(kind, here, monkeypatch)
            run.train(range(3))
            run.checkpoint.save(path)
            return path, run.state()

    return save


@pytest.mark.parametrize("kind", [momentum, adam])
@pytest.mark.parametrize(
    ("before", "after", "num_steps"),
    [(None, (1, 1), 0), (None, (3, 3), 2), ((3, 3), (2, 2), 2), ((2, 2), (3, 3), 0), ((1, 1), (3, 5), 2)],
)
def test_servers_read_what_they_have_and_training_goes_on(
    kind: Kind,
    before: tuple[int, int] | None,
    after: tuple[int, int],
    num_steps: int,
    saved: Saved,
    read: Counter[tuple[str, str, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of programs that have trained, and that begin; 50 steps more are those of one that the driver restored."""
    path, expected = saved(kind, *(before or ()))
    states = []
    for by_servers in (True, False):
        with served(1, after[0], partitioner=FixedShardsPartitioner(after[1])) as here:
            run = Run(kind, here, monkeypatch, seed=7)
            run.train(range(40, 40 + num_steps))
            run.optimizer.param_groups[0]["lr"] = 0.7
            read.clear()
            if by_servers:
                run.checkpoint.restore(path)
                assert read
                assert not [each for each in read if not each[2]], "the driver reads no tensor"
            else:
                with driver_alone(monkeypatch):
                    run.checkpoint.restore(path)
            assert_same(run.state(), expected)
            run.train(range(3, 53))
            states.append(run.state())
    assert_same(states[0], states[1])
    assert states[0]["steps"] == 53


def test_bytes_that_lie_as_slices_do_are_read_once(
    saved: Saved, read: Counter[tuple[str, str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of a whole tensor by each server that has some of it."""
    path, _ = saved(momentum, 3, 3)
    files = [file for name in ("model", "optimizer") for file in opened(path).files(name)]
    tensors = {name for file in files for name in file.tensors}
    with served(1, 3, partitioner=FixedShardsPartitioner(3)) as here:
        run = Run(momentum, here, monkeypatch, seed=7)
        read.clear()
        run.checkpoint.restore(path)
    for file in files:
        for key, place in file.tensors.items():
            size = read[file.name, f"tensor {key!r}", True]
            assert size == place.num_bytes, (file.name, key)
    assert any(place.rows for file in files for place in file.tensors.values())
    assert "first.weight.momentum_buffer" in tensors


def damaged(path: Path, file: str, at: int = -3) -> None:
    content = bytearray((path / file).read_bytes())
    content[at] ^= 8
    (path / file).write_bytes(content)


@pytest.mark.parametrize("owner", ["model", "optimizer"])
@pytest.mark.parametrize("where", ["header", "first.weight", "index"])
def test_damage_changes_nothing_on_any_server(
    owner: str, where: str, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved(adam, 3, 3)
    name = next(each.name for each in opened(path).files(owner) if ("index" in each.name) == (where == "index"))
    file = next(each for each in opened(path).files(owner) if each.name == name)
    keys = [key for key in file.tensors if key.startswith(where)]
    at = file.tensors[keys[0]].begin if keys else 20
    with served(1, 2, partitioner=FixedShardsPartitioner(2)) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        damaged(path, name, at)
        what = f"tensor '{keys[0]}'" if keys else "its header"
        with pytest.raises(rd.DataLossError, match=rf"{name}.*{what} differs"):
            run.checkpoint.restore(path)
        assert_same(run.state(), before)
        damaged(path, name, at)
        run.checkpoint.restore(path)
        assert_same(run.state(), expected)


@pytest.mark.parametrize("is_there", [True, False])
def test_files_that_servers_cannot_open_are_the_drivers(
    is_there: bool, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved(adam, 2, 2)
    file = path / opened(path).files("optimizer")[1].name
    elsewhere = path.parent / "elsewhere"
    file.rename(elsewhere)
    original = ServedRestorer.discard

    def discard(self: ServedRestorer) -> None:
        if is_there:
            elsewhere.rename(file)
        original(self)

    monkeypatch.setattr(ServedRestorer, "discard", discard)
    with served(1, 2) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        if is_there:
            run.checkpoint.restore(path)
            assert_same(run.state(), expected)
            return
        with pytest.raises(rd.DataLossError, match=f"{file.name}' is missing"):
            run.checkpoint.restore(path)
        assert_same(run.state(), before)


def test_in_memory_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Run(adam)
    bare.train(range(3))
    path = bare.checkpoint.save(f"memory://{uuid.uuid4().hex}/c")
    monkeypatch.setattr(ServedRestorer, "prepare", None)
    with served(1, 2, partitioner=FixedShardsPartitioner(2)) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.checkpoint.restore(path)
        assert_same(run.state(), bare.state())


@pytest.mark.parametrize(
    ("num_workers", "consistency"), [(1, "async"), (2, "async"), (2, BoundedStaleness(1)), (2, SyncWithBackups(0))]
)
def test_closures_see_what_was_restored_without_a_look_by_the_driver(
    num_workers: int, consistency: Any, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers hold values of before, and read newer ones."""
    path, expected = saved(momentum)
    with served(num_workers, 2, consistency, partitioner=FixedShardsPartitioner(2)) as here:
        run = Run(momentum, here, monkeypatch, seed=7)
        run.train(range(4))
        weight = run.model.first.weight  # found now: `model.first` in a closure would have the driver look
        values = [here.schedule(lambda: weight.detach().clone()) for _ in range(8)]
        assert not torch.equal(values[0].get(), expected["model"]["first.weight"])
        here.coordinator.join()
        run.checkpoint.restore(path)
        values = [here.schedule(lambda: weight.detach().clone()) for _ in range(8)]
        here.coordinator.join()
        for value in values:
            assert torch.equal(value.get(), expected["model"]["first.weight"])


def test_a_restore_of_some_leaves_others_as_they_are(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = saved(adam)
    with served(1, 2, partitioner=FixedShardsPartitioner(2)) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(4))
        before = run.state()
        run.checkpoint.restore(path, only="model")
        assert_same(run.state(), {**before, "model": expected["model"]})
        run.checkpoint.restore(path, only=["optimizer"])
        assert_same(run.state(), {**expected, "steps": before["steps"]})


class Wider(Net):
    """More than was saved, and less."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(2, 2)
        del self.factor
        self.register_buffer("factor", torch.tensor(1.0), persistent=False)


def test_entries_that_are_there_on_one_side_only(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the driver restores them: with strict=False they stay, else all are listed."""
    path, _ = saved(adam)
    found = []
    for by_driver in (False, True):
        monkeypatch.setattr("tests.coordinator.test_restoring_slices.Net", Wider)
        with served(1, 2, partitioner=FixedShardsPartitioner(2)) as here, monkeypatch.context() as patch:
            if by_driver:
                patch.setattr(ServedRestorer, "can_restore", lambda self, obj: False)
            run = Run(adam, here, patch, seed=7)
            run.optimizer.param_groups[0]["eps"] = 0.25
            run.train(range(2))
            before = run.state()
            with pytest.raises(rd.InvalidArgumentError) as caught:
                run.checkpoint.restore(path)
            assert_same(run.state(), before)
            report = run.checkpoint.restore(path, strict=False)
            found.append((run.state(), report, str(caught.value)))
    assert_same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert "model.third.weight" in found[0][1].missing
    assert "model.factor" in found[0][1].unexpected


def edited(path: Path, change: Callable[[SavedCheckpoint], Any]) -> None:
    """Have the manifest say something else of the optimizer."""
    checkpoint = opened(path)
    objects = {**checkpoint.manifest.objects, "optimizer": change(checkpoint)}
    manifest = replace(checkpoint.manifest, objects=objects)
    directory_files(str(path)).replace("manifest.json", manifest.to_bytes())


def test_what_has_another_shape_or_type_is_listed_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what optimizers remember: servers compare that."""
    bare = Run(momentum)
    bare.train(range(3))
    bare.model.first.double()
    bare.model.norm.weight.data = torch.ones(6)
    bare.model.norm.running_mean = torch.ones(6)
    second = bare.model.second.weight
    bare.optimizer.state[second]["momentum_buffer"] = torch.ones(7, 7, dtype=torch.float16)
    bare.optimizer.state[bare.model.tied.bias]["momentum_buffer"] = torch.ones(8)
    bare.checkpoint.save(tmp_path / "c")
    with served(1, 2, partitioner=FixedShardsPartitioner(2)) as here:
        run = Run(momentum, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        with pytest.raises(rd.InvalidArgumentError, match="retyped") as caught:
            run.checkpoint.restore(tmp_path / "c")
        for entry in ("first.weight", "first.bias", "norm.weight", "norm.running_mean"):
            assert f"'model.{entry}' is re" in str(caught.value)
        with pytest.raises(rd.InvalidArgumentError) as caught:
            run.checkpoint.restore(tmp_path / "c", only="optimizer")
        message = str(caught.value)
        assert "second.weight.momentum_buffer' is retyped (torch.float32 here, torch.float16 saved)" in message
        assert "tied.bias.momentum_buffer' is reshaped ((7,) here, (8,) saved)" in message
        assert message.count("momentum_buffer") == 2
        assert_same(run.state(), before)


def test_what_can_be_no_state_is_loss(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = saved(adam)
    whole = opened(path).saved("optimizer")
    with served(1, 2) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        entries: list[Any] = [3, [], {"step": {"$tensor": "no"}}, {"step": {"$strange": 3}}]
        for entry in entries:
            values = {**whole.values, "first.weight": entry}
            edited(path, lambda checkpoint, values=values: replace(whole, values=values))  # type: ignore[misc]
            with pytest.raises(rd.DataLossError, match="none"):
                run.checkpoint.restore(path)
            assert_same(run.state(), before)
        edited(path, lambda checkpoint: whole)
        run.checkpoint.restore(path)
        assert_same(run.state(), expected)


class Extra(nn.Module):
    """Has more in its state than variables."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_states_of_the_programs_own_making_are_the_drivers(
    saved: Saved, read: Counter[tuple[str, str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare, model = Run(adam), Extra()
    model.seen = 5
    rd.Checkpoint(extra=model, model=bare.model).save(tmp_path / "c")
    with served(1, 2) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        with here.mirror.scope():
            theirs = Extra()
        with torch.no_grad():
            theirs.weight.zero_()
        here.schedule(lambda: theirs.weight.sum() + theirs.seen).get()
        rd.Checkpoint(extra=theirs, model=run.model).restore(tmp_path / "c")
        assert_same(
            dict(run.model.state_dict()), bare.state()["model"]
        )  # of before any step: the driver has no old ones
        assert here.schedule(lambda: theirs.weight.sum() + theirs.seen).get() == 8
    assert {(name, by_server) for name, _, by_server in read} == {
        ("extra.safetensors", False),
        ("model.safetensors", True),
    }


class Doubled(nn.Linear):
    """Takes its state in its own way."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({key: 2 * value for key, value in state_dict.items()}, strict, assign)


def test_a_program_is_called_where_it_loads_states_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Doubled(2, 2)
    rd.Checkpoint(model=bare).save(tmp_path / "c")
    with served(1, 2) as here:
        Run(adam, here, monkeypatch)
        with here.mirror.scope():
            theirs = Doubled(2, 2)
        here.schedule(lambda: theirs.weight.sum()).get()
        rd.Checkpoint(model=theirs).restore(tmp_path / "c")
        assert torch.equal(here.schedule(lambda: theirs.weight.detach().clone()).get(), 2 * bare.weight.detach())


def test_another_worker_asks_again_where_one_dies(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = saved(adam)
    with served(2, 2, partitioner=FixedShardsPartitioner(2)) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        here.coordinator.join()
        begun: list[str] = []
        original = PartReader.begin

        def begin(self: Any, order: Any, held: Any) -> None:
            original(self, order, held)
            begun.append(threading.current_thread().name)
            if len(begun) == 2:  # both servers have begun, and nobody hears of it
                here.port.kill(int(begun[0].removeprefix("worker ")))

        monkeypatch.setattr(PartReader, "begin", begin)
        run.checkpoint.restore(path)
        assert len(begun) == 4
        assert_same(run.state(), expected)


def test_where_a_server_is_gone_before_all_commit_options_are_those_of_before(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(adam)
    with served(1, 2) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.optimizer.param_groups[0]["lr"] = 0.5
        run.train(range(2))
        before = run.state()

        def commit(token: str) -> None:
            raise rd.UnavailableError("parameter server 1 is gone")

        with monkeypatch.context() as patch:
            patch.setattr(here.side, "commit_restore", commit)
            with pytest.raises(rd.UnavailableError, match="is gone"):
                run.checkpoint.restore(path)
        assert_same(run.state(), before)
        assert run.optimizer.param_groups[0]["lr"] == 0.5
        assert all(server._has._restorer._reading is None for server in here.servers)  # type: ignore[union-attr]


def test_what_servers_cannot_have_is_the_drivers_until_a_step_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not elementwise: servers refuse it. An error of a closure before is told as it is."""
    bare = Run(torch.optim.LBFGS)
    bare.checkpoint.save(tmp_path / "c")
    with served(1, 2) as here:
        run = Run(torch.optim.LBFGS, here, monkeypatch, seed=7)
        run.checkpoint.restore(tmp_path / "c")
        assert_same(dict(run.model.state_dict()), bare.state()["model"])
        with pytest.raises(rd.InvalidArgumentError, match="demands a closure"):
            run.train(range(1))
    with served(1, 2) as here:
        run = Run(momentum, here, monkeypatch, seed=7)

        def fail() -> None:
            raise rd.InvalidArgumentError("no good")

        here.schedule(fail)
        with pytest.raises(rd.InvalidArgumentError, match="no good"):
            run.checkpoint.restore(tmp_path / "c", only="model")
