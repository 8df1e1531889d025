from __future__ import annotations

import pickle

from raydist.parameter_servers.lanes.ticket import HALL_BELL, HALL_BYTES, LANE, SERVER, WORKER, LaneTicket


def test_ticket_travels() -> None:
    ticket = LaneTicket("parameter server 0", "/proc/1/fd/2", b"a", "/proc/1/fd/3", b"b")
    assert pickle.loads(pickle.dumps(ticket)) == ticket


def test_places_are_apart() -> None:
    assert LANE.bell(SERVER) != LANE.bell(WORKER)
    assert LANE.ring(0, inward=True) != LANE.ring(0, inward=False)
    assert HALL_BELL + 4 <= HALL_BYTES
