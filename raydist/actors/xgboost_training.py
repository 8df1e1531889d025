"""Training with XGBoost on the workers of Ray Train."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from raydist.cluster.nodes import connect
from raydist.core.errors import InvalidArgumentError
from raydist.core.optional_packages import optional_module


def xgboost() -> Any:
    """Return the module xgboost.

    Raises:
        FailedPreconditionError: It is not installed.
    """
    return optional_module("xgboost", "Random forests", "'raydist[xgboost]', on all nodes")


def train_booster(rows: Any, params: dict[str, Any], num_workers: int, storage_path: str | None) -> bytes:
    """Train for one round on a Ray Data dataset of rows, and return the booster in XGBoost's format. Blocks.

    Rows have the columns x, y (float32 vectors) and weight. Each worker holds its share of them. `storage_path` is
    where Ray Train keeps its records of the run: None for a temporary folder, which serves workers of one node.
    """
    xgboost()
    connect()
    from ray.train import RunConfig, ScalingConfig
    from ray.train.xgboost import RayTrainReportCallback, XGBoostTrainer

    shares = rows.repartition(num_workers).materialize().split(num_workers)  # Ray Train's own split may drop rows
    with tempfile.TemporaryDirectory() as folder, _interrupts_restored():
        trainer = XGBoostTrainer(
            _train_worker,
            train_loop_config={"params": params, "shares": shares},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=storage_path or folder),
        )
        checkpoint: Any = trainer.fit().checkpoint
        booster = RayTrainReportCallback.get_model(checkpoint)
    return bytes(booster.save_raw("ubj"))


@contextlib.contextmanager
def _interrupts_restored() -> Iterator[None]:
    """Restore the handler of SIGINT. Ray Train leaves one of its own, which keeps its actors alive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _train_worker(config: dict[str, Any]) -> None:
    from ray import train
    from ray.train.xgboost import RayTrainReportCallback

    module = xgboost()
    share = config["shares"][train.get_context().get_world_rank()]
    parts = list(share.iter_batches(batch_size=4096, batch_format="numpy"))
    if not parts:
        raise InvalidArgumentError("Each worker must have rows, but one got none. Use a smaller num_workers.")
    x, y, weight = (np.concatenate([part[name] for part in parts]) for name in ("x", "y", "weight"))
    matrix = module.QuantileDMatrix(x, label=y, weight=weight)
    module.train(config["params"], matrix, num_boost_round=1, callbacks=[RayTrainReportCallback()])
