from __future__ import annotations

import pickle

from raydist.parameter_servers.server_stats import ServerMeter, ServerStats


def test_counts_become_statistics() -> None:
    meter = ServerMeter(pulls=1, pushes=2, repeated=3, fenced=4, late=5, steps=6, bytes_pulled=7, bytes_pushed=8)
    for versions in (3, 0, 3):
        meter.note_staleness(versions)
    meter.apply_seconds = 0.5
    stats = meter.stats(1, bytes_held=9, version=10)
    expected = ServerStats(1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, {0: 1, 3: 2}, 10)
    assert stats == expected == pickle.loads(pickle.dumps(stats))
    assert (stats.late, stats.steps, stats.bytes_held, stats.version) == (5, 6, 9, 10)
    meter.note_staleness(0)
    assert stats.staleness == {0: 1, 3: 2}  # those of then
