from __future__ import annotations

import math

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from raydist.summaries.counting import counted
from raydist.summaries.encoding import event_of, first_events
from raydist.summaries.pictures import Pictures
from raydist.summaries.record import Shown
from raydist.summaries.said_once import GraphShown, Hyperparameters, Text
from tests.summaries.records import record_of


def event(name: str, shown: Shown | float) -> Event:
    return Event.FromString(event_of(record_of(name, shown, step=3)))


def test_a_file_says_its_version_and_what_it_replaces() -> None:
    version, start = (Event.FromString(data) for data in first_events(1.0, purge_step=5))
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (5, SessionLog.SessionStatus.Value("START"))
    assert len(list(first_events(1.0))) == 1


def test_a_scalar_may_be_nan() -> None:
    found = event("loss", math.nan)
    assert (found.step, found.wall_time, found.summary.value[0].tag) == (3, 1.0, "loss")
    assert math.isnan(found.summary.value[0].simple_value)


def test_a_histogram_of_nothing_has_numbers() -> None:
    histogram = event("values", counted(np.zeros(0))).summary.value[0].histo
    assert (histogram.min, histogram.max, histogram.num) == (0.0, 0.0, 0.0)
    assert len(histogram.bucket) == len(histogram.bucket_limit) == 1


def test_several_pictures_have_numbers_and_one_has_none() -> None:
    picture = np.zeros((2, 2, 1), np.uint8)
    several = event("x", Pictures((picture, picture), 3)).summary.value
    assert [value.tag for value in several] == ["x/0", "x/1"]
    assert [value.tag for value in event("x", Pictures((picture,), 1)).summary.value] == ["x"]
    assert not event("x", Pictures((), 1)).summary.value


def test_a_table_of_texts_has_its_shape() -> None:
    tensor = event("t", Text(("a", "b"), (1, 2))).summary.value[0].tensor
    assert [dim.size for dim in tensor.tensor_shape.dim] == [1, 2]
    assert list(tensor.string_val) == [b"a", b"b"]


def test_hyperparameters_are_three_values_and_a_graph_is_no_summary() -> None:
    tags = [value.tag for value in event("_hparams_", Hyperparameters({"lr": 0.1}, ("loss",))).summary.value]
    assert tags == ["_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"]
    assert event("graph", GraphShown(b"")).WhichOneof("what") == "graph_def"


def test_a_kind_that_it_does_not_know() -> None:
    class Unknown(Shown):
        def joined(self, others: object) -> Shown:
            return self

    with pytest.raises(TypeError, match="Unknown must be known"):
        event_of(record_of("x", Unknown()))
