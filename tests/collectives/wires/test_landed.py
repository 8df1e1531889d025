from __future__ import annotations

from raydist.collectives.wires.channel import Passage
from raydist.collectives.wires.landed import Landed


def test_all_must_have_landed() -> None:
    transfers = [Passage(peer, memoryview(bytearray(1))) for peer in (4, 4, 7)]
    condition = Landed(transfers)
    assert (condition.met(), condition.outside(), condition.lost(), condition.missing()) == (False, (4, 7), (), ())
    transfers[2].broken = True
    transfers[0].done = True
    assert (condition.outside(), condition.lost()) == ((4, 7), (7,))
    for transfer in transfers:
        transfer.done = True
    assert (condition.met(), condition.outside()) == (True, ())
