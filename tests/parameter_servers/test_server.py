from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pytest
import torch

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.requests import (
    AddOptimizer,
    Assign,
    BeginRestore,
    BeginSave,
    CommitRestore,
    CreateSlices,
    CreateTable,
    DiscardRestore,
    FenceWorker,
    OptimizerGroup,
    OptimizerState,
    Pull,
    PullRows,
    Push,
    PushKey,
    ReadReport,
    RowState,
    SaveReport,
    Sender,
    ServerRequest,
    SetOptimizerState,
    SetRowState,
    Statistics,
)
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.server_state import ServerRestorer, ServerSaver, ServerState
from raydist.parameter_servers.table_spec import EmbeddingTableSpec
from tests.parameter_servers.examples import OPTIMIZER, answer, ask, create, push_of, servers, slice_of, slices_of_zeros

GRADIENT = torch.ones(2, dtype=torch.float64)


def test_the_dead_change_nothing() -> None:
    with servers() as [server]:
        create(server, 2)
        answer(server, FenceWorker(Sender(0, 1)))
        for sender in (Sender(0, 0), Sender(0, 1)):
            assert answer(server, push_of(PushKey(1, 0), sender), GRADIENT).verdict == "fenced"
            written = Assign(sender, PushKey(1, 1), (0,), (False,))
            assert answer(server, written, GRADIENT).verdict == "fenced"
            told, tensors = ask(server, Pull((0,), sender))
            assert (told.verdict, tensors) == ("fenced", [])
        assert answer(server, push_of(PushKey(1, 0), Sender(0, 2)), GRADIENT).verdict == "applied"
        stats = answer(server, Statistics()).value
        assert (stats.pushes, stats.fenced) == (1, 4)


def test_values_written_by_hand() -> None:
    with servers() as [server]:
        count = slice_of(1, dtype=torch.int64)
        answer(server, CreateSlices((slice_of(0, 2), count)), torch.zeros(2).double(), torch.tensor(5))
        sender = Sender(0, 0)
        written = Assign(sender, PushKey(1, 0), (0, 1), (False, True))
        for expected in ("applied", "known"):
            assert answer(server, written, GRADIENT * 7, torch.tensor(2)).verdict == expected
        assert [tensor.tolist() for tensor in ask(server, Pull((0, 1)))[1]] == [[7, 7], 7]
        with pytest.raises(rd.InvalidArgumentError, match=r"each of 2 slices, got 1 of them and 2 marks"):
            server.handle(Assign(sender, PushKey(1, 1), (0, 1), (False, True)), [GRADIENT])


def test_what_has_not_changed_is_not_sent() -> None:
    with servers() as [server]:
        create(server, 2)
        told, tensors = ask(server, Pull((0,)))
        assert len(tensors) == 1
        assert ask(server, Pull((0,), unless=told.version))[1] == []
        answer(server, push_of(PushKey(1, 0)), GRADIENT)
        assert len(ask(server, Pull((0,), unless=told.version))[1]) == 1


def test_what_it_did_is_counted() -> None:
    with servers() as [server]:
        create(server, 2)
        ask(server, Pull((0,)))
        for key in range(3):
            answer(server, push_of(PushKey(key, 0), read_version=1), GRADIENT)
        answer(server, push_of(PushKey(0, 0)), GRADIENT)
        stats = answer(server, Statistics()).value
        assert (stats.server, stats.pulls, stats.pushes, stats.repeated) == (0, 1, 3, 1)
        assert (stats.bytes_pulled, stats.bytes_pushed) == (16, 48)
        assert stats.staleness == {0: 1, 1: 1, 2: 1}
        assert stats.version == 4
        assert stats.bytes_held == 16
        assert 0 < stats.apply_seconds < math.inf


class Unheard(ServerRequest):
    pass


def test_what_it_does_not_know() -> None:
    with servers() as [server]:
        with pytest.raises(rd.InvalidArgumentError, match=r"a ServerRequest that they know, got Unheard"):
            server.handle(Unheard())
        with pytest.raises(rd.InvalidArgumentError, match=r"not number 3"):
            server.handle(Pull((3,)))
        with pytest.raises(rd.InvalidArgumentError, match=r'consistency must be "async"'), servers(1, "sync"):  # type: ignore[arg-type]
            pass


def test_slices_come_in_several_parts_and_may_be_overwritten() -> None:
    with slices_of_zeros() as mine:
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


def test_more_than_there_is_room_for_says_by_how_much() -> None:
    with (
        slices_of_zeros(room=1_000_000) as mine,
        pytest.raises(rd.InvalidArgumentError, match=r"1,048,576 bytes more .* 48,576 too few"),
    ):
        mine.create([slice_of(1, 1 << 17)], [torch.zeros(1 << 17).double()])


def test_values_are_replaced_all_or_none() -> None:
    with slices_of_zeros(slice_of(1, 2), slice_of(2)) as mine:
        mine.replace({1: torch.tensor([3.0, 4.0]).double(), 2: torch.tensor(5.0).double()})
        assert (mine.value(1).tolist(), mine.value(2).item(), mine.version) == ([3, 4], 5, 2)
        for number, value in ((2, torch.zeros(1).double()), (2, torch.tensor(0.0)), (7, torch.zeros(1))):
            with pytest.raises(rd.InvalidArgumentError):
                mine.replace({1: torch.zeros(2).double(), number: value})
        assert (mine.value(1).tolist(), mine.value(2).item(), mine.version) == ([3, 4], 5, 2)


TABLE = 50

SPEC = EmbeddingTableSpec(1000, 4, dtype=torch.float64, initializer="zeros")


def test_an_optimizer_keeps_what_it_remembers_when_it_is_added_again() -> None:
    with servers() as [server]:
        create(server, 2, lr=1.0, momentum=0.5)
        answer(server, push_of(PushKey(0, 0)), GRADIENT)
        create(server, 2, lr=1.0, momentum=0.5)
        states = answer(server, OptimizerState(OPTIMIZER)).value
        assert states[0]["momentum_buffer"].tolist() == [1, 1]
        answer(server, SetOptimizerState(OPTIMIZER, {0: {"momentum_buffer": torch.full((2,), 4.0).double()}}))
        answer(server, push_of(PushKey(1, 0)), GRADIENT)
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
    with servers(memory=20_000) as [server]:
        create(server, 1000)
    message = r"server 0 is to hold 16,000 bytes for a Adam and has 12,000 free: 4,000 too few"
    with servers(memory=20_000) as [server], pytest.raises(rd.InvalidArgumentError, match=message):
        create(server, 1000, kind=torch.optim.Adam)


class Saver(ServerSaver):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.closed = False

    def begin(self, order: Any, tensors: Sequence[torch.Tensor], held: ServerState) -> None:
        self.seen = [order, tensors[0].tolist(), held.value(3).tolist()]

    def report(self, token: str) -> Any:
        return f"{token} is done"

    def close(self, within_s: float) -> None:
        self.closed = True


def test_a_server_lets_it_see_what_it_has() -> None:
    saver = Saver()
    with servers(saver=saver) as (server,):
        answer(server, CreateSlices((slice_of(3, 2),)), torch.tensor([1.0, 2.0], dtype=torch.float64))
        answer(server, BeginSave("order"), torch.ones(1))
        assert saver.seen == ["order", [1.0], [1.0, 2.0]]
        assert answer(server, SaveReport("a")).value == "a is done"
        assert not saver.closed
    assert saver.closed


@pytest.mark.parametrize("request_", [BeginSave("order"), DiscardRestore()])
def test_a_server_without_one_says_so(request_: ServerRequest) -> None:
    with servers() as (server,), pytest.raises(InvalidArgumentError, match=f"got {type(request_).__name__}"):
        answer(server, request_)


ROWS: dict[str, Any] = {"rows": torch.tensor([2]), "values": torch.ones(1, 3), "optimizers": {}}


class Restorer(ServerRestorer):
    def __init__(self) -> None:
        self.tables: dict[int, RowTable] = {}
        self.told: list[str] = []

    def begin(self, order: int, held: ServerState) -> None:
        self.tables = {order: held.table(order).anew()}
        self.tables[order].load([ROWS])

    def report(self, token: str) -> Any:
        return f"{token} is done"

    def commit(self, token: str, held: ServerState) -> None:
        held.replace({**self.tables, **({9: self.tables[3]} if token == "more" else {})}, {}, {})

    def discard(self) -> None:
        self.told.append("discard")

    def close(self, within_s: float) -> None:
        self.told.append("close")


def test_a_server_has_what_was_read_once_that_is_committed() -> None:
    restorer = Restorer()
    with servers(restorer=restorer) as (server,):
        answer(server, CreateTable(3, EmbeddingTableSpec(8, 3)))
        answer(server, BeginRestore(3))
        assert answer(server, ReadReport("a")).value == "a is done"
        assert len(answer(server, RowState(3)).value["rows"]) == 0
        with pytest.raises(InvalidArgumentError, match="must be created before"):
            answer(server, CommitRestore("more"))
        assert len(answer(server, RowState(3)).value["rows"]) == 0, "all or none"
        answer(server, CommitRestore("a"))
        assert answer(server, RowState(3)).value["values"].tolist() == [[1.0, 1.0, 1.0]]
        answer(server, DiscardRestore())
        assert restorer.told == ["discard"]
    assert restorer.told == ["discard", "close"]
