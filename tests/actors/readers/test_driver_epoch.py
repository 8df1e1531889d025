"""An epoch of the driver: opened once, lent and taken back, ended once or when nobody holds it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from raydist.actors.readers.driver_epoch import DriverEpoch
from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, distribute
from raydist.options import InputOptions
from tests.actors.readers.fakes import fake_side


def made(side: InputSide) -> tuple[DriverEpoch, Any]:
    """An epoch over five steps, and its host."""
    iterator: Any = iter(distribute(Dataset.range(5).batch(1), side, InputOptions(num_input_workers=0)))
    return DriverEpoch(side.opener, iterator._job), side.opener


def test_nothing_begins_before_it_is_opened() -> None:
    with fake_side(1) as side:
        read, host = made(side)
        assert not read.is_open
        with pytest.raises(FailedPreconditionError, match="must have been opened"):
            _ = read.link
        with pytest.raises(FailedPreconditionError, match="must have a reader"):
            _ = read.reader
        read.end()
        assert host.links == []


def test_it_is_lent_taken_back_and_ended() -> None:
    with fake_side(1) as side:
        read, host = made(side)
        read.open(None)
        read.open(None)
        assert len(host.links) == 1
        for _ in range(3):
            read.reader.next_place()
        read.lend()
        read.lend()
        assert read.lent
        assert host.pipeline.open_epochs() == [read.link.key]
        host.pipeline.release(read.link.key, 0, 3)
        host.pipeline.release(read.link.key, 0, 3)
        assert read.take_back()["step"] == 3
        assert not read.lent
        place = read.reader.next_place()
        assert place.number == 3
        read.release()
        read.end()
        assert host.pipeline.open_epochs() == []


def test_what_is_forgotten_begins_anew_at_another_state() -> None:
    with fake_side(1) as side:
        read, host = made(side)
        read.open(None)
        state = read.reader.next_place().state
        read.forget()
        assert host.pipeline.open_epochs() == []
        read.open(state)
        batch = read.reader.next_place().batch
        assert batch is not None
        assert batch.group.refs[0].leaf(0, batch.place).tolist() == [1]
        read.release()


def test_a_pass_that_nobody_holds_is_abandoned() -> None:
    with fake_side(1) as side:
        read, host = made(side)
        read.open(None)
        del read
        gc.collect()
        assert host.pipeline.open_epochs() == []
