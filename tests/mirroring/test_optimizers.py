"""Optimizers note their steps for the schedulers."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref

import torch
from torch import nn

from raydist.mirroring.optimizers import note_steps


def test_a_scheduler_made_elsewhere_does_not_warn() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    note_steps(optimizer)
    note_steps(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert parameter.item() == 0.0
    assert optimizer._opt_called is True  # type: ignore[attr-defined]


def test_optimizer_is_not_kept_alive() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    note_steps(optimizer)
    ghost = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ghost() is None


def test_still_pickles() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    note_steps(optimizer)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.5
