"""Steps on several replicas show what one replica would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from tests.summary.reading import everything, loop, show_everything
from tests.training.toys import compiled, regression, small_net


def shown(strategy: rd.Strategy, logdir: Path) -> dict[str, Any]:
    """Three batches of 5, 5 and 1 rows: with several replicas some have more rows than others, and some none."""
    data = strategy.distribute_dataset(rd.Dataset.range(11).batch(5))
    with rd.summary.create_file_writer(logdir) as writer:
        for step, batch in enumerate(data):
            with writer.as_default(step=step):
                strategy.run(show_everything, args=(batch,))
        with writer.as_default():
            strategy.run(loop, args=(iter(data),))
            rd.summary.scalar("of the driver", 0.5, step=2)
    return everything(logdir)


def test_one_replica_shows_the_rows(tmp_path: Path) -> None:
    found = shown(rd.OneDeviceStrategy("cpu"), tmp_path)
    assert found["scalars"] == {
        "mean": [(0, 2.0), (1, 7.0), (2, 10.0)],
        "rows": [(0, 5.0), (1, 5.0), (2, 1.0)],
        "in a loop": [(0, 2.0), (2, 10.0)],
        "of the driver": [(2, 0.5)],
    }
    assert sorted(found["images"]) == ["first", "rows/0", "rows/1", "rows/2"]
    assert found["images"]["rows/1"] == [(0, [[[13] * 3] * 4] * 2), (1, [[[77] * 3] * 4] * 2)]
    assert found["images"]["first"] == [(0, [[0]]), (1, [[5]]), (2, [[10]])]
    assert found["audio"]["rows/1"][0] == (0, (8000, 2, [round(32767 / 20)] * 16))
    assert found["texts"] == {"note": [(step, [b"said **once**"]) for step in range(3)]}
    assert [histogram.num for _, histogram in found["histograms"]["values"]] == [5, 5, 1]


@pytest.mark.ray
def test_two_replicas_and_closures_show_the_same(
    two: rd.MirroredStrategy, served: Callable[[int], rd.ParameterServerStrategy], tmp_path: Path
) -> None:
    alone = shown(rd.OneDeviceStrategy("cpu"), tmp_path / "one")
    assert shown(two, tmp_path / "two") == alone
    assert shown(served(1), tmp_path / "served") == alone


@pytest.mark.ray
def test_a_step_may_hold_its_writer_and_counts_its_own_steps(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    with two.scope():
        rd.get_global_step().zero_()
    with rd.summary.create_file_writer(tmp_path) as writer:

        def step() -> None:
            with writer.as_default():
                rd.summary.scalar("rank", float(rd.get_replica_context().replica_id_in_sync_group))
            rd.get_global_step().add_(1)

        for _ in range(3):
            two.run(step)
        writer.flush()
        assert everything(tmp_path)["scalars"] == {"rank": [(0, 0.5), (1, 0.5), (2, 0.5)]}


@pytest.mark.ray
def test_what_came_before_a_step_that_failed_is_written(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    def step(number: int) -> None:
        rd.summary.scalar("number", float(number), step=number)
        if number == 2:
            raise ZeroDivisionError

    writer = rd.summary.create_file_writer(tmp_path)
    with writer.as_default():
        for number in range(3):
            two.run(step, args=(number,))
        with pytest.raises(ZeroDivisionError):
            writer.close()
    assert everything(tmp_path)["scalars"] == {"number": [(0, 0.0), (1, 1.0)]}


@pytest.mark.ray
def test_fit_shows_the_same_on_replicas(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    found = []
    for name, strategy in (("one", rd.OneDeviceStrategy("cpu")), ("two", two)):
        with strategy.scope():
            rd.get_global_step().zero_()
            model = compiled(small_net())
        board = rd.TensorBoard(tmp_path / name, histogram_freq=1, update_freq=2)
        model.fit(regression(10, 4), epochs=2, callbacks=[board], verbose=False)
        found.append(everything(tmp_path / name / "train"))
    one, several = found
    for curve in ("epoch_loss", "batch_loss", "epoch_learning_rate"):
        assert [step for step, _ in several["scalars"][curve]] == [step for step, _ in one["scalars"][curve]]
        assert [v for _, v in several["scalars"][curve]] == pytest.approx([v for _, v in one["scalars"][curve]], 1e-6)
    assert "input/wait" in several["scalars"]
    assert [step for step, _ in several["texts"]["input/bottleneck"]] == [3, 6]
    assert several["histograms"].keys() == one["histograms"].keys()
