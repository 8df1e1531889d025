"""Training with XGBoost on the workers of Ray Train."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any, final

import numpy as np
import ray

from raydist.cluster.nodes import connect
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError

FEATURES, TARGETS, WEIGHT = "x", "y", "weight"
"""Columns of the rows: float32 vectors, and a number."""


def xgboost() -> Any:
    """Return the module xgboost.

    Raises:
        FailedPreconditionError: It is not installed.
    """
    try:
        return import_module("xgboost")
    except ImportError as error:
        raise FailedPreconditionError(
            f"Random forests need the package xgboost, which cannot be imported ({error}). Run: pip install "
            "'raydist[xgboost]', on all nodes."
        ) from error


def train_booster(rows: Any, params: dict[str, Any], num_workers: int, storage_path: str | None) -> bytes:
    """Train for one round on a Ray Data dataset of rows, and return the booster in XGBoost's format. Blocks.

    Each worker holds its share of the rows. `storage_path` is where Ray Train keeps its records of the run: None for a
    temporary folder, which serves workers of one node.
    """
    xgboost()
    connect()
    from ray.train import RunConfig, ScalingConfig
    from ray.train.xgboost import XGBoostTrainer

    shares = rows.repartition(num_workers).materialize().split(num_workers)  # Ray Train's own split may drop rows
    receiver: Any = ray.remote(num_cpus=0)(_Receiver).remote()
    with tempfile.TemporaryDirectory() as folder, _interrupts_restored():
        trainer = XGBoostTrainer(
            _train_worker,
            train_loop_config={"params": params, "shares": shares, "receiver": receiver},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=storage_path or folder),
        )
        try:
            trainer.fit()
            booster: bytes = ray.get(receiver.last.remote())
        finally:
            ray.kill(receiver)
    return booster


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


@final
class _Receiver:
    """An actor that holds the booster for the driver."""

    def __init__(self) -> None:
        self._booster = b""

    def keep(self, booster: bytes) -> None:
        self._booster = booster

    def last(self) -> bytes:
        return self._booster


def _train_worker(config: dict[str, Any]) -> None:
    from ray import train

    module = xgboost()
    rank = train.get_context().get_world_rank()
    parts: dict[str, list[np.ndarray]] = {FEATURES: [], TARGETS: [], WEIGHT: []}
    for batch in config["shares"][rank].iter_batches(batch_size=4096, batch_format="numpy"):
        for name, blocks in parts.items():
            blocks.append(np.asarray(batch[name]))
    if not parts[WEIGHT]:
        raise InvalidArgumentError("Each worker must have rows, but one got none. Use a smaller num_workers.")
    columns = {name: np.concatenate(blocks) for name, blocks in parts.items()}
    matrix = module.QuantileDMatrix(columns[FEATURES], label=columns[TARGETS], weight=columns[WEIGHT])
    booster = module.train(config["params"], matrix, num_boost_round=1)
    if rank == 0:
        ray.get(config["receiver"].keep.remote(bytes(booster.save_raw("ubj"))))
