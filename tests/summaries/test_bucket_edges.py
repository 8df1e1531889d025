from __future__ import annotations

import numpy as np
from tensorboardX.writer import SummaryWriter as Peer

from raydist.summaries.bucket_edges import bucket_edges


def test_edges_are_those_of_tensorboard() -> None:
    theirs = Peer(write_to_disk=False).default_bins
    assert bucket_edges()[1:-1].tolist() == theirs
    assert bucket_edges()[0] == -np.finfo(np.float64).max
    assert bucket_edges()[-1] == np.finfo(np.float64).max
