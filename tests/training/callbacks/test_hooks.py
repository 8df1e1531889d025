from __future__ import annotations

import inspect

import raydist as rd
from raydist.training.callbacks.hooks import PredictHooks, TestHooks, TrainHooks


def test_a_callback_has_every_hook_and_none_does_anything() -> None:
    names = [name for kind in (TrainHooks, TestHooks, PredictHooks) for name in vars(kind) if name.startswith("on_")]
    assert len(names) == 16
    callback = rd.Callback()
    for name in names:
        hook = getattr(callback, name)
        assert hook(*([{}] * len(inspect.signature(hook).parameters))) is None
