"""The journal in which a program under trial notes its steps, and the digest of its final state."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

__all__ = ["Account", "JOURNAL_VARIABLE", "Journal", "account_of", "differences", "state_digest"]


JOURNAL_VARIABLE = "RAYDIST_JOURNAL"
"""Names the folder of a trial in the environment of its program."""

_FILE = "journal"
_KEPT = "kept"


@final
class Journal:
    """The journal of one trial, written by the program, which keeps in `folder` what must outlive it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as trial:
    ...     journal = Journal(Path(trial))
    ...     journal.begins(0)
    ...     journal.saw(1, [0, 1])
    ...     journal.ends("digest")
    ...     account_of(journal.lines()).rows
    {1: [0, 1]}
    """

    def __init__(self, trial: Path) -> None:
        self.folder = trial / _KEPT
        self._file = trial / _FILE

    @classmethod
    def of_environment(cls) -> Journal:
        """Return the journal of the trial that started this process."""
        return cls(Path(os.environ[JOURNAL_VARIABLE]))

    def begins(self, step: int) -> None:
        """Record that the process has restored the state that it found, and continues after step `step`."""
        self._write({"begins": step, "pid": os.getpid(), "at": time.time()})

    def saw(self, step: int, rows: Sequence[int]) -> None:
        """Record that step `step` was trained on these rows. Call this before a save that counts the step."""
        self._write({"step": step, "rows": list(rows)})

    def acknowledged(self, step: int) -> None:
        """Record that the state saved after step `step` is safe: the program was told so."""
        self._write({"acknowledged": step})

    def ends(self, digest: str) -> None:
        """Record the end, with the digest of the final state."""
        self._write({"ends": digest, "at": time.time()})

    def has_begun(self, pid: int) -> bool:
        """Return True if the process of this id has called `begins`."""
        return any(line.get("pid") == pid for line in map(json.loads, self.lines()))

    def lines(self) -> list[str]:
        """Return the lines written so far. A process that is killed leaves whole lines: each is one write."""
        return self._file.read_text().splitlines() if self._file.exists() else []

    def _write(self, line: dict[str, Any]) -> None:
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)


@final
@dataclass
class Account:
    """The result of all lives of a program together.

    Attributes:
        rows: Those of each step that counts: what a life did behind the step at which the next one began does not.
        begun: At which step each life began.
        digest: Of the life that ended; empty if none did.
        lost: Lives that began before the newest step that had been acknowledged.
        worked_s: From the begin of the life that ended to its end, without its start.
    """

    rows: dict[int, list[int]] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    digest: str = ""
    lost: list[str] = field(default_factory=list)
    worked_s: float = field(default=0.0, compare=False)


def account_of(lines: Iterable[str]) -> Account:
    """Return the result that a journal describes."""
    account, acknowledged, began = Account(), 0, 0.0
    for line in map(json.loads, lines):
        if "begins" in line:
            step = line["begins"]
            if step < acknowledged:
                account.lost.append(f"life {len(account.begun)} began at step {step}, but {acknowledged} was safe")
            account.begun.append(step)
            began = line.get("at", 0.0)
            account.rows = {number: rows for number, rows in account.rows.items() if number <= step}
        elif "rows" in line:
            account.rows[line["step"]] = line["rows"]
        elif "acknowledged" in line:
            acknowledged = max(acknowledged, line["acknowledged"])
        elif "ends" in line:
            account.digest, account.worked_s = line["ends"], line.get("at", 0.0) - began
    return account


def differences(expected: Account, found: Account) -> list[str]:
    """Return the differences between a program that was killed and one that was not; empty if all is well."""
    problems = list(found.lost)
    for step in sorted({*expected.rows, *found.rows}):
        wanted, got = expected.rows.get(step), found.rows.get(step)
        if wanted != got:
            problems.append(f"step {step} must have the rows {wanted}, got {got}")
            break
    if expected.digest != found.digest:
        problems.append(f"the end must have the digest {expected.digest}, got {found.digest or 'none'}")
    return problems


def state_digest(state: Any) -> str:
    """Return the digest of a nest of dicts, lists, tuples, tensors, arrays and JSON values. Keys may come in any order.

    >>> one, other = {"a": torch.ones(2), "b": [1]}, {"b": [1], "a": torch.ones(2)}
    >>> state_digest(one) == state_digest(other), state_digest(one) == state_digest({"a": torch.ones(2), "b": [1.0]})
    (True, False)
    """
    return hashlib.sha256(json.dumps(_plain(state), sort_keys=True).encode()).hexdigest()[:16]


def _plain(state: Any) -> Any:
    """Return kind and content of each value."""
    if isinstance(state, torch.Tensor):
        return _plain(state.detach().numpy())
    if isinstance(state, np.ndarray | np.generic):
        return ["array", state.dtype.str, state.shape, state.tobytes().hex()]
    if isinstance(state, Mapping):
        return {repr(key): _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [type(state).__name__, *map(_plain, state)]
    assert state is None or isinstance(state, bool | int | float | str | bytes), state
    return f"{type(state).__name__} {state!r}"
