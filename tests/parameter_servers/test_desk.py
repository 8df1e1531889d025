from __future__ import annotations

from raydist.parameter_servers.closure_requests import Arrive, Finish
from raydist.parameter_servers.desk import Outcome, ServerDesk, Tell
from raydist.parameter_servers.requests import Pull, PushKey, Sender
from tests.parameter_servers.plain_server import PlainServer


def teller(name: str, told: list[tuple[str, Outcome]]) -> Tell:
    return lambda outcome: told.append((name, outcome))


def test_each_is_told_once_when_it_may_be() -> None:
    server = PlainServer()
    desk = ServerDesk(server)
    told: list[tuple[str, Outcome]] = []
    for name, step in (("a", 1), ("b", 2), ("c", 0), ("d", 1)):
        desk.take(Pull((), at_least_step=step), (), teller(name, told))
    assert [name for name, _ in told] == ["c"]
    desk.take(Finish(), (), teller("finish", told))
    assert [name for name, _ in told] == ["c", "finish", "a", "d"]
    assert told[-1][1].answer.step == 1
    desk.take(Finish(), (), teller("finish", told))
    assert [name for name, _ in told][4:] == ["finish", "b"]
    server.close()


def test_errors_are_told_to_who_asked() -> None:
    server = PlainServer()
    told: list[Outcome] = []
    ServerDesk(server).take(Arrive(Sender(0, 0), PushKey(0, 0), 0), (), told.append)
    assert "must be asked plain things" in str(told[0].error)
    server.close()
