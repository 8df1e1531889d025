from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import raydist as rd
from tests.training.toys import Recorder, compiled, regression, small_net


def test_callbacks_know_model_and_params() -> None:
    class Look(rd.Callback):
        def on_train_begin(self, logs: dict[str, Any]) -> None:
            self.seen = (self.model, dict(self.params))

    look = Look()
    model = compiled(small_net())
    model.fit(regression(10, 4), epochs=2, callbacks=[look], verbose=False)
    assert look.seen == (model, {"epochs": 2, "steps": 3})


def test_the_batch_end_hook_gets_logs_in_evaluate_and_predict() -> None:
    seen: dict[str, list[Any]] = {"test": [], "predict": []}

    class Look(rd.Callback):
        def on_test_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
            seen["test"].append(sorted(logs))

        def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
            seen["predict"].append(tuple(logs["outputs"].shape))

    model = compiled(small_net())
    model.evaluate(regression(5, 4), callbacks=[Look()], verbose=False)
    model.predict(regression(5, 4), callbacks=[Look()], verbose=False)
    assert seen == {"test": [["loss"], ["loss"]], "predict": [(4, 1), (1, 1)]}


def test_evaluate_and_predict_call_their_hooks_in_order() -> None:
    model = compiled(small_net())
    recorder = Recorder()
    model.evaluate(regression(4, 4), callbacks=[recorder], verbose=False)
    model.predict(regression(4, 4), callbacks=[recorder], verbose=False)
    assert recorder.calls == [
        *("test_begin", "test_batch_begin 0", "test_batch_end 0", "test_end"),
        *("predict_begin", "predict_batch_begin 0", "predict_batch_end 0", "predict_end"),
    ]
