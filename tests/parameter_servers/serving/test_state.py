from __future__ import annotations

import cloudpickle
import pytest
import torch

import raydist as rd
from raydist.parameter_servers.requests import (
    AddOptimizer,
    CreateTable,
    OptimizerGroup,
    OptimizerState,
    PullRows,
    Push,
    PushKey,
    RowState,
    Sender,
    SetOptimizerState,
    SetRowState,
)
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec
from tests.parameter_servers.examples import OPTIMIZER, BareWorker, answer, ask, served, servers, slice_of


def test_slices_come_in_several_parts_and_may_be_overwritten() -> None:
    with served() as mine:
        assert mine.version == 0
        mine.create([slice_of(1, 2), slice_of(4)], [torch.ones(2).double(), torch.tensor(3.0).double()])
        first = mine.value(1)
        mine.create(
            [slice_of(2, 1, dtype=torch.int8), slice_of(1, 2)], [torch.tensor([5]).char(), torch.zeros(2).double()]
        )
        assert mine.version == 2
        assert first.tolist() == [0, 0]
        assert first.data_ptr() == mine.value(1).data_ptr()
        assert (mine.value(4).item(), mine.value(2).tolist()) == (3, [5])
        assert mine.num_bytes == 2 * 8 + 8 + 1


def test_values_must_be_the_slices() -> None:
    with served(slice_of(1, 2)) as mine:
        with pytest.raises(
            rd.InvalidArgumentError, match=r"variable2 must be torch.float64 of shape \(3,\), got torch.f"
        ):
            mine.create([slice_of(2, 3)], [torch.zeros(3)])
        with pytest.raises(rd.InvalidArgumentError, match=r"Slice 1 must stay torch.float64 of shape \(2,\)"):
            mine.create([slice_of(1, 3)], [torch.zeros(3).double()])
        with pytest.raises(rd.InvalidArgumentError, match=r"has 1 of them and not number 7"):
            mine.value(7)


def test_more_than_there_is_room_for_says_by_how_much() -> None:
    with (
        served(room=1_000_000) as mine,
        pytest.raises(rd.InvalidArgumentError, match=r"1,048,576 bytes more .* 48,576 too few"),
    ):
        mine.create([slice_of(1, 1 << 17)], [torch.zeros(1 << 17).double()])


def test_values_are_replaced_all_or_none() -> None:
    with served(slice_of(1, 2), slice_of(2)) as mine:
        mine.replace({1: torch.tensor([3.0, 4.0]).double(), 2: torch.tensor(5.0).double()})
        assert (mine.value(1).tolist(), mine.value(2).item(), mine.version) == ([3, 4], 5, 2)
        for number, value in ((2, torch.zeros(1).double()), (2, torch.tensor(0.0)), (7, torch.zeros(1))):
            with pytest.raises(rd.InvalidArgumentError):
                mine.replace({1: torch.zeros(2).double(), number: value})
        assert (mine.value(1).tolist(), mine.value(2).item(), mine.version) == ([3, 4], 5, 2)


TABLE = 50
SPEC = EmbeddingTableSpec(1000, 4, dtype=torch.float64, initializer="zeros")


def test_an_optimizer_keeps_what_it_remembers_when_its_groups_change() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.5)
    with servers() as [server]:
        worker = BareWorker([server], parameters, optimizer)
        parameters[0].grad = torch.ones(2, dtype=torch.float64)
        worker.step()
        worker.create(0)  # told again
        states = answer(server, OptimizerState(OPTIMIZER)).value
        assert states[0]["momentum_buffer"].tolist() == [1, 1]
        answer(server, SetOptimizerState(OPTIMIZER, {0: {"momentum_buffer": torch.full((2,), 4.0).double()}}))
        parameters[0].grad = torch.ones(2, dtype=torch.float64)
        worker.step()
        assert answer(server, OptimizerState(OPTIMIZER)).value[0]["momentum_buffer"].tolist() == [3, 3]


def test_tables_are_pulled_pushed_saved_and_loaded() -> None:
    rows = torch.tensor([7, 700])
    with servers() as [server]:
        answer(server, CreateTable(TABLE, SPEC))
        answer(server, CreateTable(TABLE, SPEC))  # told again
        options = torch.optim.SGD([torch.zeros(1)], lr=0.5).defaults
        added = AddOptimizer(OPTIMIZER, cloudpickle.dumps(torch.optim.SGD), (OptimizerGroup(options, tables=(TABLE,)),))
        answer(server, added)
        push = Push(Sender(0, 0), PushKey(0, 0), OPTIMIZER, (), (), tables=(TABLE,))
        for verdict in ("applied", "known"):
            told = answer(server, push, rows, torch.ones(2, 4, dtype=torch.float64))
            assert told.verdict == verdict
        assert ask(server, PullRows(TABLE), rows)[1][0].tolist() == [[-0.5] * 4] * 2
        saved = answer(server, RowState(TABLE)).value
        again = Push(Sender(0, 0), PushKey(1, 0), OPTIMIZER, (), (), tables=(TABLE,))
        answer(server, again, rows, torch.ones(2, 4).double())
        answer(server, SetRowState(TABLE, [saved]))
        assert ask(server, PullRows(TABLE), rows)[1][0].tolist() == [[-0.5] * 4] * 2
        assert server.stats.bytes_held > 2 * 4 * 8


def test_what_is_not_there() -> None:
    with servers() as [server]:
        with pytest.raises(rd.InvalidArgumentError, match=r"Optimizers must be added .* has \[\] and not 3"):
            server.handle(OptimizerState(3))
        with pytest.raises(rd.InvalidArgumentError, match=r"Embedding tables must be created .* has \[\] and not 3"):
            server.handle(RowState(3))
        with pytest.raises(rd.InvalidArgumentError, match=r"one int64 tensor of their numbers, got \[torch.float32\]"):
            server.handle(PullRows(3), [torch.ones(2)])
        with pytest.raises(rd.InvalidArgumentError, match=r"optimizer that the server has, got handle 4 of \[\]"):
            server.handle(Push(Sender(0, 0), PushKey(0, 0), 4, (), ()))


def test_room_for_what_an_optimizer_remembers() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))]
    with servers(memory=20_000) as [server]:
        BareWorker([server], parameters, torch.optim.SGD(parameters, lr=1.0))
    message = r"server 0 is to hold 16,000 bytes for a Adam and has 12,000 free: 4,000 too few"
    with servers(memory=20_000) as [server], pytest.raises(rd.InvalidArgumentError, match=message):
        BareWorker([server], parameters, torch.optim.Adam(parameters))
