"""The chips of all hosts, and how they exchange tensors: each writes its file and waits for those of the others."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import torch

LIMIT_S = 20.0


class _Here(threading.local):
    """What torch_xla keeps for each thread: the chip that it works on."""

    index = 0


HERE = _Here()
RUNNING: dict[int, list[Future[None]]] = defaultdict(list)
"""Programs that chips of this process are at, by ordinal."""


def chips_per_host() -> int:
    return int(os.environ["XLA_STAND_IN_CHIPS"])


def num_chips() -> int:
    return chips_per_host() * len(os.environ.get("TPU_WORKER_HOSTNAMES", "localhost").split(","))


def ordinal() -> int:
    """Of this thread's chip: the last host has the first ones."""
    before = int(os.environ.get("TPU_WORKER_ID", "0")) * chips_per_host()
    return num_chips() - 1 - before - HERE.index


def launch(
    program: str, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor], result: torch.Tensor
) -> torch.Tensor:
    """Run a program of all chips beside this thread: `result` holds what it makes once it has run."""
    done: Future[None] = Future()
    before = RUNNING[ordinal()][-1:]
    RUNNING[ordinal()].append(done)
    # The folder is named here: a program that nobody waits for any more may begin when the next test has its own.
    folder = Path(os.environ["XLA_STAND_IN_FOLDER"])
    arguments = (folder, ordinal(), num_chips(), program, tensor, combine, result, done, before)
    threading.Thread(target=_run, args=arguments, daemon=True).start()
    return result


def _run(
    folder: Path,
    mine: int,
    count: int,
    program: str,
    tensor: torch.Tensor,
    combine: Any,
    result: torch.Tensor,
    done: Future[None],
    before: list[Future[None]],
) -> None:
    wait_for(before)  # a chip does one thing after the other
    try:
        result.copy_(combine(_exchange(folder, mine, count, program, tensor)))
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def wait(mine: int) -> None:
    """Until this chip has nothing to do; for any number of threads at once."""
    running = RUNNING[mine]
    for done in tuple(running):
        wait_for([done])
        with contextlib.suppress(ValueError):  # another thread waited, too, and takes it away
            running.remove(done)
        done.result()


def _exchange(folder: Path, mine: int, count: int, program: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all chips, by ordinal. On a TPU different programs would wait for each other for ever."""
    counter = folder / f"count-{mine}"  # outlives the process: a slice is used by one after another
    number = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(number + 1))
    (folder / f"{number - 2}-{mine}").unlink(missing_ok=True)
    written = folder / f"{number}-{mine}.part"
    torch.save((program, tensor), written)
    written.rename(folder / f"{number}-{mine}")
    found = [_load(folder / f"{number}-{other}") for other in range(count)]
    programs = {program for program, _ in found}
    if len(programs) > 1:
        raise RuntimeError(f"chips run different programs, and would never end: {sorted(programs)}")
    return [values for _, values in found]


def _load(path: Path) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() >= deadline:
            raise RuntimeError(f"a chip waits for ever: {path.name} does not come")
        time.sleep(0.0005)
    return torch.load(path)
