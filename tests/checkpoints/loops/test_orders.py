"""What driver and replicas tell each other travels."""

from __future__ import annotations

import pickle

import raydist as rd
from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.loops.orders import IteratorPlace, LoopCount, LoopOrder, ManagerOrder, SaveOutcome, WantedSave
from raydist.checkpoints.save_interval import SaveInterval


def test_orders_and_answers_travel() -> None:
    manager = ManagerOrder("key", "/runs", "ckpt", SaveInterval(3), LoopCount(2, None), objects={"model": 4})
    order = LoopOrder((manager,), 10.0)
    wanted = WantedSave("t", "key", 3, 4, {"loss": 1.0}, (IteratorPlace({"at": 1}, False),))
    outcome = SaveOutcome(pack_error(ValueError("full")), 1, rd.Preempted(3, "why"))
    assert pickle.loads(pickle.dumps((order, wanted))) == (order, wanted)
    again = pickle.loads(pickle.dumps(outcome))
    assert (str(again.left), again.left.code, again.failures) == ("why", 3, 1)
