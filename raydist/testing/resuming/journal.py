"""What a program that is going to be killed tells about itself, and what follows from that.

A line is in the file when the call returns, whatever becomes of the process: the journal is the witness. Files that the
program keeps are judged by it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from raydist.errors import FailedPreconditionError

__all__ = ["JOURNAL_VARIABLE", "Account", "Journal", "account_of", "differences"]

JOURNAL_VARIABLE = "RAYDIST_JOURNAL"
"""Names the folder of a trial in the environment of its program."""

_FILE = "journal"
_KEPT = "kept"


@final
class Journal:
    """Written by the program under trial. Constructing it creates nothing.

    Args:
        trial: Folder of the trial.

    Attributes:
        folder: Where the program keeps what must outlive it: its checkpoints.

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
        """The one of the trial that started this process.

        Raises:
            FailedPreconditionError: There is none.
        """
        trial = os.environ.get(JOURNAL_VARIABLE)
        if trial is None:
            raise FailedPreconditionError(
                f"A program under trial must be started by raydist.testing, but {JOURNAL_VARIABLE} is not set. Set it "
                "to an empty folder to run the program alone."
            )
        return cls(Path(trial))

    def begins(self, step: int) -> None:
        """The process has restored what it found, and goes on behind step `step`."""
        self._write({"begins": step, "pid": os.getpid(), "at": time.time()})

    def saw(self, step: int, rows: Sequence[int]) -> None:
        """Step `step` was trained on these rows. Say so before anything is saved that counts the step."""
        self._write({"step": step, "rows": list(rows)})

    def acknowledged(self, step: int) -> None:
        """What was saved behind step `step` is safe: the program was told so."""
        self._write({"acknowledged": step})

    def ends(self, digest: str) -> None:
        """All is done; the digest of all that came of it."""
        self._write({"ends": digest, "at": time.time()})

    def has_begun(self, pid: int) -> bool:
        """Whether the process of this id has called `begins`."""
        return any(line.get("pid") == pid for line in map(json.loads, self.lines()))

    def lines(self) -> list[str]:
        """What was written so far. A process that is killed leaves whole lines: each is one write."""
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
    """What all lives of a program come to.

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
    """What a journal says."""
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
    """In what a program that was killed differs from one that was not; nothing where all is well.

    >>> differences(Account({1: [0], 2: [1]}, [0], "a"), Account({1: [0], 2: [2]}, [0, 1], "a"))
    ['step 2 must have the rows [1], got [2]']
    """
    problems = list(found.lost)
    for step in sorted({*expected.rows, *found.rows}):
        wanted, got = expected.rows.get(step), found.rows.get(step)
        if wanted != got:
            problems.append(f"step {step} must have the rows {wanted}, got {got}")
            break
    if expected.digest != found.digest:
        problems.append(f"the end must have the digest {expected.digest}, got {found.digest or 'none'}")
    return problems
