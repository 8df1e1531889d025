"""What a save adds to the counters."""

from __future__ import annotations

from collections import Counter

from raydist.actors.metric_counters import SaveMetrics


class Counts:
    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def raise_by(self, amounts: dict[str, float]) -> None:
        self.found.update(amounts)


def test_saves_and_their_pauses_are_counted() -> None:
    counts = Counts()
    metrics = SaveMetrics("somewhere", counts)
    metrics.note_save(0.25)
    metrics.note_save(0.5)
    assert counts.found == {"raydist_checkpoints": 2, "raydist_checkpoint_pause_seconds": 0.75}


def test_without_ray_nothing_happens() -> None:
    SaveMetrics("somewhere").note_save(0.25)
