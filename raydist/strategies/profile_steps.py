"""`rd.profile_steps`: traces of the steps of every replica by `torch.profiler`, merged into one file."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile

from raydist.context.strategy import Strategy
from raydist.core.errors import InvalidArgumentError
from raydist.strategies.functions import get_replica_context
from raydist.strategies.parameter_server import ParameterServerStrategy

_PIDS_OF_RANK = 1 << 24  # processes of rank r are shown as r * _PIDS_OF_RANK + pid


@contextlib.contextmanager
def profile_steps(
    strategy: Strategy,
    path: str | Path,
    *,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
) -> Iterator[None]:
    """Record the steps that run in a `with` block on every replica, and write one trace of all replicas.

    The file is in Chrome's trace format, compressed: open it in https://ui.perfetto.dev. It has the operators and, on
    GPUs, the kernels of each replica, under "replica 0", "replica 1", ... Clocks of different nodes are taken as equal.
    A block of 3 to 10 steps is enough: traces are large, and profiling slows steps down.

    Entering and leaving the block waits for the steps that were dispatched before.

    Args:
        strategy: The strategy that runs the steps.
        path: The file to write, in this process: "trace.json.gz". Its folder is created if needed.
        record_shapes: Record the shapes of inputs, as `torch.profiler.profile` does.
        profile_memory: Record allocations.
        with_stack: Record Python's call stacks.

    Raises:
        InvalidArgumentError: The strategy has parameter servers, whose workers run different functions.

    Source: torch.profiler.profile.

    >>> import os, tempfile, torch
    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> path = os.path.join(tempfile.mkdtemp(), "trace.json.gz")
    >>> with rd.profile_steps(strategy, path):
    ...     for _ in range(3):
    ...         result = strategy.run(lambda: torch.ones(10).sum())
    >>> os.path.getsize(path) > 0
    True
    """
    if isinstance(strategy, ParameterServerStrategy):
        raise InvalidArgumentError(
            "profile_steps needs a strategy whose replicas run the same steps, got ParameterServerStrategy. Use "
            "torch.profiler in the function that you schedule."
        )
    key = uuid.uuid4().hex
    begin = functools.partial(
        _begin, key, record_shapes=record_shapes, profile_memory=profile_memory, with_stack=with_stack
    )
    strategy.local_results(strategy.run(begin))
    try:
        yield
    finally:
        traces = strategy.local_results(strategy.run(functools.partial(_end, key)))
        _write(Path(path), merge([json.loads(gzip.decompress(trace)) for trace in traces]))


@functools.lru_cache(maxsize=256)
def _profiler(key: str, rank: int) -> list[profile]:
    """Return where a replica keeps its profiler between the first and the last step of a recording."""
    return []


def _begin(key: str, **options: Any) -> int:
    profiler = profile(**options)
    _profiler(key, get_replica_context().replica_id_in_sync_group).append(profiler)
    profiler.start()
    return 0


def _end(key: str) -> bytes:
    context = get_replica_context()
    profiler = _profiler(key, context.replica_id_in_sync_group).pop()
    profiler.stop()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return gzip.compress(Path(file.name).read_bytes(), compresslevel=1)


def merge(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the traces of all replicas, in rank order, into one; processes and flows get numbers of their own.

    >>> event = {"ph": "X", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 1.0, "dur": 2.0}
    >>> one = {"traceEvents": [event], "baseTimeNanoseconds": 1_000}
    >>> two = {"traceEvents": [event], "baseTimeNanoseconds": 3_000}
    >>> [(found["pid"], found["ts"]) for found in merge([one, two])["traceEvents"]]
    [(7, 1.0), (16777223, 3.0)]
    """
    base = traces[0].get("baseTimeNanoseconds", 0)
    events = []
    for rank, trace in enumerate(traces):
        later_us = (trace.get("baseTimeNanoseconds", 0) - base) / 1_000
        pid_of = functools.partial(_pid, rank)
        events += [_moved(event, rank, pid_of, later_us) for event in trace["traceEvents"]]
    return {**traces[0], "traceEvents": events}


def _moved(event: dict[str, Any], rank: int, pid_of: Callable[[Any], Any], later_us: float) -> dict[str, Any]:
    moved = dict(event)
    if "pid" in moved:
        moved["pid"] = pid_of(moved["pid"])
    if "ts" in moved:
        moved["ts"] += later_us
    if "id" in moved:
        moved["id"] = f"{rank}.{moved['id']}"
    if moved.get("name") == "process_name":
        moved["args"] = {"name": f"replica {rank}: {moved['args']['name']}"}
    return moved


def _pid(rank: int, pid: Any) -> Any:
    return pid + rank * _PIDS_OF_RANK if isinstance(pid, int) else f"{pid} of replica {rank}"


def _write(path: Path, trace: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", compresslevel=1) as file:
        json.dump(trace, file)
