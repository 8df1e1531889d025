"""Servers restore the slices and rows that they have, and the states of optimizers; the driver reads no tensor."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints.ps_reader import ServerReader
from raydist.checkpoints.restore import PreparedShard
from raydist.coordinator.checkpointing import PsRestorer
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.parameter_servers.slices import FixedShardsPartitioner
from raydist.pipelines.stored.directory_files import directory_files
from tests.coordinator.ps_in_process import (
    Kind,
    LocalStrategy,
    Net,
    Run,
    Saved,
    adam,
    assert_same,
    begun,
    driver_alone,
    local_strategy,
    momentum,
    opened,
    read,
    saved,
)

__all__ = ["read", "saved"]

HALVES = FixedShardsPartitioner(2)
ROWS = "model.embedding_rows"


def reads_nothing_more(here: LocalStrategy) -> bool:
    return all(server._state._restorer._reading is None for server in here.servers)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "before", "after", "num_steps"),
    [(adam, None, (1, 1), 0), (momentum, (3, 3), (2, 2), 2), (adam, (1, 1), (3, 5), 2)],
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
    """Of programs that have trained, and that begin; 20 steps more are those of one that the driver restored."""
    path, expected = saved(kind, *(before or ()))
    states = []
    for by_servers in (True, False):
        with local_strategy(1, after[0], partitioner=FixedShardsPartitioner(after[1])) as here:
            run = Run(kind, here, monkeypatch, seed=7)
            run.train(range(40, 40 + num_steps))
            run.optimizer.param_groups[0]["lr"] = 0.7
            read.clear()
            if by_servers:
                with monkeypatch.context() as patch:
                    for method in ("state_dict", "load_state_dict"):
                        patch.setattr(SavedRows, method, None)
                    run.checkpoint.restore(path)
                assert not [each for each in read if not each[2]], "the driver reads no tensor"
                files = {name for name, _, _ in read if name.startswith(ROWS) and "index" not in name}
                assert len(files) == (before or (1,))[0]
                tables = [table for server in here.servers for table in server._state.tables.values()]
                num_rows = sum(table.num_rows for table in tables if isinstance(table, RowTable))
                assert num_rows == 39, "those of the checkpoint, and no others"
            else:
                with driver_alone(monkeypatch):
                    run.checkpoint.restore(path)
            assert_same(run.state(), expected)
            run.train(range(3, 23))
            states.append(run.state())
    assert_same(states[0], states[1])
    assert states[0]["steps"] == 23


@pytest.mark.parametrize("is_there", [True, False])
def test_files_that_servers_cannot_open_are_the_drivers(
    is_there: bool, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved(adam, 2, 2)
    file = path / opened(path).files("optimizer")[1].name
    elsewhere = path.parent / "elsewhere"
    file.rename(elsewhere)
    original = PsRestorer.discard

    def discard(self: PsRestorer) -> None:
        if is_there:
            elsewhere.rename(file)
        original(self)

    monkeypatch.setattr(PsRestorer, "discard", discard)
    with local_strategy(1, 2) as here:
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


def test_closures_see_what_was_restored_without_a_look_by_the_driver(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers hold values of before, and read newer ones."""
    path, expected = saved(momentum)
    rules: list[Any] = ["async", rd.BoundedStaleness(1), rd.SyncWithBackups(0)]
    for consistency in rules:
        with local_strategy(2, 2, consistency, partitioner=HALVES) as here:
            run = Run(momentum, here, monkeypatch, seed=7)
            run.train(range(4))
            weight = run.model.first.weight  # found now: `model.first` in a closure would have the driver look

            def seen(here: LocalStrategy = here, weight: torch.Tensor = weight) -> list[torch.Tensor]:
                values = [here.schedule(lambda: weight.detach().clone()) for _ in range(8)]
                here.coordinator.join()
                return [value.get() for value in values]

            assert not torch.equal(seen()[0], expected["model"]["first.weight"])
            run.checkpoint.restore(path)
            assert all(torch.equal(value, expected["model"]["first.weight"]) for value in seen())


def test_a_restore_comes_after_what_was_scheduled_and_before_what_comes_then(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(momentum, 2)
    bare = Run(momentum)
    bare.checkpoint.restore(path)
    bare.train(range(3, 6))
    with local_strategy(1, 2) as here:
        run = Run(momentum, here, monkeypatch)
        run.train(range(30))  # under way
        save = begun(run, path.parent / "other")
        run.checkpoint.restore(path)
        run.train(range(3, 6))
        assert_same(run.state(), bare.state(), 1e-5)
        save.write()


def test_a_restore_of_some_leaves_others_as_they_are(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = saved(adam)
    with local_strategy(1, 2, partitioner=HALVES) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(4))
        before = run.state()
        run.checkpoint.restore(path, only="model")
        assert_same(run.state(), {**before, "model": expected["model"], "rows": expected["rows"]})
        run.checkpoint.restore(path, only=["optimizer"])
        assert_same(run.state(), {**expected, "steps": before["steps"]})


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
    with local_strategy(1, 2) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        with here.mirror.scope():
            theirs = Extra()
        with torch.no_grad():
            theirs.weight.zero_()
        here.schedule(lambda: theirs.weight.sum() + theirs.seen).get()
        rd.Checkpoint(extra=theirs, model=run.model).restore(tmp_path / "c")
        # Of before any step: the driver has no old ones.
        assert_same(dict(run.model.state_dict()), bare.state()["model"])
        assert here.schedule(lambda: theirs.weight.sum() + theirs.seen).get() == 8
    by_server = {name: by_server for name, _, by_server in read if not name.startswith(ROWS)}
    assert by_server == {"extra.safetensors": False, "model.safetensors": True}


def test_another_worker_asks_again_where_one_dies(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = saved(adam)
    with local_strategy(2, 2, partitioner=HALVES) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        here.coordinator.join()
        asked: list[str] = []
        original = ServerReader.begin

        def begin(self: Any, order: Any, held: Any) -> None:
            original(self, order, held)
            asked.append(threading.current_thread().name)
            if len(asked) == 2:  # both servers have begun, and nobody hears of it
                here.port.kill(int(asked[0].removeprefix("worker ")))

        monkeypatch.setattr(ServerReader, "begin", begin)
        run.checkpoint.restore(path)
        assert len(asked) == 4
        assert_same(run.state(), expected)


def test_options_stay_and_servers_forget_where_one_is_gone_or_late(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(adam)
    gone = mock.Mock(side_effect=rd.UnavailableError("parameter server 1 is gone"))
    late = mock.Mock(return_value=[PreparedShard(), None])
    with local_strategy(1, 2) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.optimizer.param_groups[0]["lr"] = 0.5
        run.train(range(2))
        before = run.state()
        for method, answer, limit_s, message in (
            ("commit_restore", gone, 20.0, "is gone"),
            ("restored", late, 0.01, "1 of 2 parameter servers have not"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(here.restorer, "_limit_s", limit_s)
                patch.setattr(here.side, method, answer)
                with pytest.raises(rd.RaydistError, match=message):
                    run.checkpoint.restore(path)
            assert_same(run.state(), before)
            assert run.optimizer.param_groups[0]["lr"] == 0.5
            assert reads_nothing_more(here)


def test_what_servers_cannot_have_is_the_drivers_until_a_step_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not elementwise: servers refuse it. An error of a closure before is told as it is."""
    bare = Run(torch.optim.LBFGS)
    bare.checkpoint.save(tmp_path / "c")
    with local_strategy(1, 2) as here:
        run = Run(torch.optim.LBFGS, here, monkeypatch, seed=7)
        run.checkpoint.restore(tmp_path / "c")
        assert_same(dict(run.model.state_dict()), bare.state()["model"])
        with pytest.raises(rd.InvalidArgumentError, match="demands a closure"):
            run.train(range(1))
    with local_strategy(1, 2) as here:
        run = Run(momentum, here, monkeypatch, seed=7)

        def fail() -> None:
            raise rd.InvalidArgumentError("no good")

        here.schedule(fail)
        with pytest.raises(rd.InvalidArgumentError, match="no good"):
            run.checkpoint.restore(tmp_path / "c", only="model")


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 8
    file.write_bytes(content)


def test_damage_changes_nothing_on_any_server(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the header, of a whole tensor's file and of the index, of whatever server's part."""
    path, expected = saved(adam, 3, 3)
    with local_strategy(2, 2, partitioner=HALVES) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        for owner, where in (
            *(("model", "header"), ("model", "first.weight"), ("model", "index")),
            *(("optimizer", "header"), ("optimizer", "first.weight"), ("optimizer", "index")),
            *((ROWS, "header"), (ROWS, "words/1.values")),
        ):
            files = [each for each in opened(path).files(owner) if ("index" in each.name) == (where == "index")]
            found = [(file, key) for file in files for key in file.tensors if key.startswith(where)]
            file, key = found[-1] if found else (files[-1], None)
            at = file.tensors[key].begin if key else 20
            flip(path / file.name, at)
            what = f"tensor '{key}" if key else "its header"
            with pytest.raises(rd.DataLossError, match=rf"{file.name}.*{what}.* differs"):
                run.checkpoint.restore(path)
            assert_same(run.state(), before)
            assert reads_nothing_more(here)
            flip(path / file.name, at)
        run.checkpoint.restore(path)
        assert_same(run.state(), expected)


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
        monkeypatch.setattr("tests.coordinator.ps_in_process.Net", Wider)
        with local_strategy(1, 2, partitioner=HALVES) as here, monkeypatch.context() as patch:
            if by_driver:
                patch.setattr(PsRestorer, "can_restore", lambda self, obj: False)
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


def test_what_has_another_shape_or_type_is_listed_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what optimizers remember, which servers compare, and of tables."""
    path, bare = tmp_path / "c", Run(momentum)
    bare.train(range(3))
    bare.model.first.double()
    bare.model.norm.weight.data = torch.ones(6)
    bare.model.norm.running_mean = torch.ones(6)
    second = bare.model.second.weight
    bare.optimizer.state[second]["momentum_buffer"] = torch.ones(7, 7, dtype=torch.float16)
    bare.optimizer.state[bare.model.tied.bias]["momentum_buffer"] = torch.ones(8)
    bare.checkpoint.save(path)
    with local_strategy(1, 2, partitioner=HALVES) as here:
        run = Run(momentum, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        with pytest.raises(rd.InvalidArgumentError, match="retyped") as caught:
            run.checkpoint.restore(path)
        for entry in ("first.weight", "first.bias", "norm.weight", "norm.running_mean"):
            assert f"'model.{entry}' is re" in str(caught.value)
        with pytest.raises(rd.InvalidArgumentError) as caught:
            run.checkpoint.restore(path, only="optimizer")
        message = str(caught.value)
        assert "second.weight.momentum_buffer' is retyped (torch.float32 here, torch.float16 saved)" in message
        assert "tied.bias.momentum_buffer' is reshaped ((7,) here, (8,) saved)" in message
        assert message.count("momentum_buffer") == 2
        for name, sizes, why in (
            ("words", (1000, 4), r"'model.words.weight' is reshaped \(\(0, 4\) here, \(0, 3\) saved\)"),
            ("words", (20, 3), r"must be below 20 .*, got \d+ rows up to \d\d"),
            ("letters", (1000, 3), "embeddings, which are letters, got 'words'"),
        ):
            with here.mirror.scope():
                other = nn.ModuleDict({name: rd.ShardedEmbedding(*sizes)})
            with pytest.raises(rd.InvalidArgumentError, match=why):
                rd.Checkpoint(model=other).restore(path, strict=False)
        assert_same(run.state(), before)


def test_what_can_be_no_state_is_loss(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = saved(adam)
    files, manifest = directory_files(str(path)), opened(path).manifest
    rows = manifest.objects[ROWS].values["words/0"]
    states: list[Any] = [3, [], {"step": {"$tensor": "no"}}, {"step": {"$strange": 3}}]
    parts: list[Any] = [{"rows": 3}, {"optimizers": 3}, {"rows": {"$tensor": "no"}}]
    bad = [("optimizer", "first.weight", state) for state in states]
    bad += [(ROWS, "words/0", part) for part in ({}, 3, *({**rows, **part} for part in parts))]

    def write(objects: Mapping[str, Any]) -> None:
        files.replace("manifest.json", replace(manifest, objects={**manifest.objects, **objects}).to_bytes())

    with local_strategy(1, 2) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        for owner, key, entry in bad:
            whole = manifest.objects[owner]
            write({owner: replace(whole, values={**whole.values, key: entry})})
            with pytest.raises(rd.DataLossError, match="invalid"):
                run.checkpoint.restore(path)
            assert_same(run.state(), before)
        write({})
        run.checkpoint.restore(path)
        assert_same(run.state(), expected)
