"""Who writes into a directory: one process at a time, and one that has died holds nobody up for long.

The lease is a small file in the directory. On the machine of its holder it is free as soon as that process is gone.
Elsewhere nobody can know: there the holder counts up in it, and a lease whose count stands still for a while is free.
Clocks are compared with themselves only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal, final

from raydist.errors import FailedPreconditionError, NotFoundError
from raydist.failpoints import failpoint
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["LEASE_FILE", "Holder", "Lease", "judge_holder", "this_process"]

LEASE_FILE = "lease.json"

_BEAT_S = 5.0  # between two counts
_LAPSE_S = 15.0  # without one, the holder is gone
_LOOK_S = 0.5
_MOST_BYTES = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class Holder:
    """Whose a lease is.

    Attributes:
        token: Of the lease: every one has another.
        host: Name of the machine.
        pid: Of the process.
        since: When, by its clock, as text.
        machine: What tells machines and what their processes are numbered in apart, as far as known.
        started: What tells processes of one number apart, as far as known.
        beat: Counts up while it lives.
    """

    token: str
    host: str
    pid: int
    since: str
    machine: str = ""
    started: str = ""
    beat: int = 0

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def of_bytes(cls, data: bytes) -> Holder | None:
        """What `to_bytes` made; None for anything else: then nobody holds it."""
        try:
            found = json.loads(data)
            texts = {name: str(found[name])[:200] for name in ("token", "host", "since", "machine", "started")}
            return cls(pid=int(found["pid"]), beat=int(found["beat"]), **texts)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def this_process() -> Holder:
    """A new lease of this process."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    started = _start_of(os.getpid())
    return Holder(uuid.uuid4().hex, socket.gethostname(), os.getpid(), since, _machine(), started)


def _machine() -> str:
    """The boot and the process namespace, as Linux knows them: containers of one machine number their own."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_of(pid: int) -> str:
    """When a process of this machine began, in ticks; empty where there is none."""
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    return ""


def judge_holder(
    holder: Holder | None, me: Holder, start_of: Callable[[int], str] = _start_of
) -> Literal["free", "mine", "held", "unknown"]:
    """Whether a lease may be taken: "unknown" where only waiting tells.

    >>> me = Holder("a", "node", 1, "today", machine="m", started="7")
    >>> judge_holder(None, me), judge_holder(me, me), judge_holder(Holder("b", "other", 1, "today", "n"), me)
    ('free', 'mine', 'unknown')
    >>> judge_holder(Holder("b", "node", 2, "today", machine="m", started="9"), me, start_of=lambda pid: "")
    'free'
    """
    if holder is None:
        return "free"
    if holder.token == me.token:
        return "mine"
    if not me.machine or holder.machine != me.machine:
        return "unknown"
    return "held" if start_of(holder.pid) == holder.started else "free"


def _is_kept_here(holder: Holder) -> bool:
    """Whether a thread of this process keeps a lease: the file of one that was given back may have stayed."""
    return any(thread.name == _thread_name(holder) for thread in threading.enumerate())


def _thread_name(holder: Holder) -> str:
    return f"raydist-lease-{holder.token}"


@contextlib.contextmanager
def _writing(files: DirectoryFiles) -> Iterator[None]:
    """Around what needs a directory in which this process may write."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EROFS:
            raise FailedPreconditionError(
                f"A CheckpointManager must be able to write into its directory {files.shown!r}, but may not: {error} "
                "Give it another one. What is there can be restored: "
                "checkpoint.restore(rd.latest_checkpoint(directory))."
            ) from error
        raise


@final
class Lease:
    """The right to write into one directory. Taken by :meth:`take`, given back by :meth:`give_back`, or when dropped.

    Args:
        files: Of the directory.
        beat_s: Between two counts.
        lapse_s: Without one, the holder is gone.
    """

    def __init__(self, files: DirectoryFiles, *, beat_s: float = _BEAT_S, lapse_s: float = _LAPSE_S) -> None:
        self._files = files
        self._beat_s, self._lapse_s = beat_s, lapse_s
        self._keeper: _Keeper | None = None

    @property
    def is_taken(self) -> bool:
        """Whether it was taken and not given back."""
        return self._keeper is not None

    def take(self) -> None:
        """Become the only writer. Waits some seconds where a process of another machine may hold it.

        Raises:
            FailedPreconditionError: Another one writes there: who, and since when. Or nothing may be written there.
        """
        if self._keeper is not None:
            return
        with _writing(self._files):
            self._files.make()
        me = this_process()
        failpoint("lease.before")
        free = self._await_free(me)
        with _writing(self._files):
            self._write(me, free)
        failpoint("lease.within")
        found = read_holder(self._files)
        if found is not None and found.token != me.token:  # somebody was as quick
            raise _held(self._files, found)
        failpoint("lease.after")
        self._keeper = _Keeper(self._files, me, self._beat_s)
        self._keeper.start()
        # What holds this may be dropped: in a notebook, say, where the next one is to write then.
        weakref.finalize(self, self._keeper.end)

    def _write(self, me: Holder, free: Holder | None) -> None:
        """Have the lease be mine, if it is yet the one that was free."""
        with self._files.alone(self._lapse_s):
            found = read_holder(self._files)
            if found is not None and found != free:  # somebody was quicker
                raise _held(self._files, found)
            self._files.replace(LEASE_FILE, me.to_bytes())

    def _await_free(self, me: Holder) -> Holder | None:
        """Whose it was before; None for nobody's."""
        holder = read_holder(self._files)
        end = time.monotonic() + self._lapse_s
        while True:
            judged = judge_holder(holder, me)
            if holder is None or judged == "free":
                return holder
            if judged == "held" and holder.pid == me.pid and not _is_kept_here(holder):
                return holder
            if judged == "held":
                raise _held(self._files, holder)
            if time.monotonic() > end:
                return holder
            time.sleep(min(_LOOK_S, self._beat_s))
            found = read_holder(self._files)
            if found is not None and (found.token, found.beat) != (holder.token, holder.beat):
                raise _held(self._files, found)
            holder = found

    def require(self) -> None:
        """FailedPreconditionError where somebody else has it now: this process was taken for dead."""
        keeper = self._keeper
        if keeper is None:
            raise FailedPreconditionError(
                f"The directory {self._files.shown!r} must be leased before something is written there, it was given "
                "back. Make a new CheckpointManager."
            )
        found = read_holder(self._files)
        if found is not None and found.token != keeper.holder.token:
            raise _held(self._files, found)

    def give_back(self) -> None:
        """Let others write. May be called twice."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.end()


def read_holder(files: DirectoryFiles) -> Holder | None:
    """Who holds the lease of a directory; None for nobody."""
    try:
        opened = files.open(LEASE_FILE)
    except NotFoundError:
        return None
    try:
        return Holder.of_bytes(bytes(opened.file.read(_MOST_BYTES) or b""))
    finally:
        opened.file.close()


def _held(files: DirectoryFiles, holder: Holder) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"One process may write checkpoints into a directory, but {files.shown!r} belongs to {holder}. Give this run a "
        "directory of its own, or end the other one; close a CheckpointManager that is not used any more."
    )


@final
class _Keeper:
    """Counts up in a lease, in a thread, until it ends. Holds no one who holds it."""

    def __init__(self, files: DirectoryFiles, holder: Holder, beat_s: float) -> None:
        self.holder = holder
        self._files = files
        self._beat_s = beat_s
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=_thread_name(holder), daemon=True)

    def start(self) -> None:
        """Begin to count."""
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s):
            with contextlib.suppress(Exception):  # a store that fails now: the next count may come through
                self._beat()

    def _beat(self) -> None:
        found = read_holder(self._files)
        with self._lock:
            if not self._ended.is_set() and (found is None or found.token == self.holder.token):
                self.holder = replace(self.holder, beat=self.holder.beat + 1)
                self._files.replace(LEASE_FILE, self.holder.to_bytes())

    def end(self) -> None:
        """Count no more, and give it back. May be called twice, from any thread."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        with self._lock:
            self._ended.set()
        # Alone: else the file may be another one's by the time that it is removed. What fails lapses by itself.
        with contextlib.suppress(Exception), self._files.alone(self._beat_s):
            found = read_holder(self._files)
            if found is not None and found.token == self.holder.token:
                self._files.remove(LEASE_FILE)
        if self._thread is not threading.current_thread():
            self._thread.join(self._beat_s)
