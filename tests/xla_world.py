"""torch_xla for tests: the real one where it is installed (`make test-xla`), else the stand-in of this folder."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.xla.communicator import XlaBackend
from tests.collectives.threads import ThreadTeam
from tests.contracts.communicator import Body

STAND_IN = Path(__file__).parent / "xla_stand_in"
IS_REAL = importlib.util.find_spec("torch_xla") is not None
TPU_LIMIT_S = 600 if IS_REAL else 180  # XLA compiles each step that it has not seen


def host_environment(chips: int, folder: Path | str, *, worker: int = 0, hosts: int = 1) -> dict[str, str]:
    """Variables of a host of a slice whose chips are the CPU."""
    known = {
        "TPU_WORKER_ID": str(worker),
        "TPU_WORKER_HOSTNAMES": ",".join(["localhost"] * hosts),
    }
    if IS_REAL:
        # A collective of XLA's CPU device takes a thread of this pool for each chip.
        return {**known, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips), "XLA_THREAD_POOL_SIZE": "16"}
    return {**known, "XLA_STAND_IN_CHIPS": str(chips), "XLA_STAND_IN_FOLDER": str(folder)}


@contextlib.contextmanager
def chips_here(count: int) -> Iterator[None]:
    """Let this process have chips, for its threads. Of the real ones only the first number counts."""
    with tempfile.TemporaryDirectory(prefix="xla-") as folder, contextlib.ExitStack() as stack:
        own = {name: os.environ.get(name) for name in (*host_environment(count, folder), "PJRT_DEVICE")}
        os.environ.update(host_environment(count, folder))
        stack.callback(_restore, own)
        if not IS_REAL:
            sys.path.insert(0, str(STAND_IN))
            stack.callback(_forget)
        yield


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _forget() -> None:
    sys.path.remove(str(STAND_IN))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
        del sys.modules[name]


class XlaTeam(ThreadTeam):
    """Ranks that are threads, each with a chip. To be used inside of :func:`chips_here`."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._store = RendezvousStore().start()
        super().__init__(
            world_size,
            timeout_s,
            lambda membership, limit_s: XlaBackend().open(membership, torch.device(f"xla:{membership.rank}"), limit_s),
            self._store,
        )

    def begin(self, bodies: Mapping[int, Body]) -> Callable[[], dict[int, Any]]:
        return super().begin({rank: functools.partial(_on_chip, body) for rank, body in bodies.items()})

    def close(self) -> None:
        super().close()
        self._store.close()


def _on_chip(body: Body, communicator: Any) -> Any:
    with communicator.device:
        return body(communicator)
