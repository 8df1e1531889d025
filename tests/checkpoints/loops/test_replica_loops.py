"""The runs of a replica, as the driver asks for them."""

from __future__ import annotations

import torch

from raydist.checkpoints.loops.orders import LoopNews, LoopOrder, SaveOutcome
from raydist.checkpoints.loops.replica_loops import ReplicaLoops
from raydist.checkpoints.sharing.share_writer import ShareWriter
from tests.checkpoints.loops.in_process import Rank


def test_a_run_is_unknown_then_under_way_then_over() -> None:
    loops = ReplicaLoops(ShareWriter(0, 1, torch.device("cpu")))
    assert loops.news(4) is None
    assert loops.hold(4) is None
    loops.draw()
    with loops.running(4, LoopOrder((), 1.0), Rank(0, 1, {})):
        loops.draw()
        assert loops.news(4) == LoopNews()
        assert loops.hold(4) == 1
        loops.stop_after(4, None)
        loops.draw()
        assert loops.hold(4) == 2
    assert loops.news(4) == LoopNews(ended=True)
    assert loops.hold(4) is None


def test_a_run_that_was_refused_is_over() -> None:
    loops = ReplicaLoops(ShareWriter(0, 1, torch.device("cpu")))
    loops.pass_by(7)
    assert loops.news(7) == LoopNews(ended=True)
    loops.stop_after(7, 1)
    loops.end_save(7, "token", SaveOutcome())
