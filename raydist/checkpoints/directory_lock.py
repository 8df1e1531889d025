"""The lock of a checkpoint directory: one process writes at a time, and a dead process does not block others for long.

The lock is a small file in the directory. On the holder's machine, the lock is free as soon as the holder's process
is gone. Other machines cannot check the process: the holder increments a count in the file, and a lock whose count
has not changed for a while is free. Each process compares times of its own clock only.
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

from raydist.core.errors import FailedPreconditionError, NotFoundError
from raydist.core.failpoints import failpoint
from raydist.pipelines.stored.directory_files import DirectoryFiles

LOCK_FILE = "lease.json"

_BEAT_S = 5.0  # between two increments
_LAPSE_S = 15.0  # without an increment for so long, the holder counts as gone
_LOOK_S = 0.5
_MOST_BYTES = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock."""

    token: str  # unique id of the lock
    host: str  # host name of the machine
    pid: int  # process id
    since: str  # time of acquisition by the holder's clock, as text
    machine: str = ""  # id of the boot and the PID namespace; empty if unknown
    started: str = ""  # start time of the process, which tells processes with one id apart; empty if unknown
    beat: int = 0  # count that the holder increments while it lives

    def to_bytes(self) -> bytes:
        """Return the holder as JSON."""
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def of_bytes(cls, data: bytes) -> Holder | None:
        """Return the holder that `to_bytes` encoded; None for any other data, which means a free lock."""
        try:
            found = json.loads(data)
            texts = {name: str(found[name])[:200] for name in ("token", "host", "since", "machine", "started")}
            return cls(pid=int(found["pid"]), beat=int(found["beat"]), **texts)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def this_process() -> Holder:
    """Return a new holder for this process."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    started = _start_of(os.getpid())
    return Holder(uuid.uuid4().hex, socket.gethostname(), os.getpid(), since, _machine(), started)


def _machine() -> str:
    """Return ids of the boot and the PID namespace on Linux: each container of a machine numbers its own processes."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_of(pid: int) -> str:
    """Return the start time of a process of this machine in ticks; empty if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
    return ""


def judge_holder(
    holder: Holder | None, me: Holder, start_of: Callable[[int], str] = _start_of
) -> Literal["free", "mine", "held", "unknown"]:
    """Return the state of a lock for the process `me`; "unknown" if only waiting can tell.

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
    """Return True if a thread of this process keeps the lock: a released lock may have left its file behind."""
    return any(thread.name == _thread_name(holder) for thread in threading.enumerate())


def _thread_name(holder: Holder) -> str:
    return f"raydist-lock-{holder.token}"


@contextlib.contextmanager
def _writing(files: DirectoryFiles) -> Iterator[None]:
    """Raise FailedPreconditionError inside the `with` block if the file system is read-only."""
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
class DirectoryLock:
    """An exclusive lock for writing into one directory. Released by :meth:`release` or when garbage-collected.

    The holder increments the count every `beat_s` seconds, and counts as gone after `lapse_s` without an increment.
    """

    def __init__(self, files: DirectoryFiles, *, beat_s: float = _BEAT_S, lapse_s: float = _LAPSE_S) -> None:
        self._files = files
        self._beat_s, self._lapse_s = beat_s, lapse_s
        self._heartbeat: _Heartbeat | None = None

    @property
    def is_acquired(self) -> bool:
        """True while this object holds the lock."""
        return self._heartbeat is not None

    def acquire(self) -> None:
        """Acquire the lock. Blocks for some seconds if a process of another machine may hold it.

        Raises:
            FailedPreconditionError: Another process holds the lock; the message says which and since when. Or the
                directory must not be written to.
        """
        if self._heartbeat is not None:
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
        if found is not None and found.token != me.token:  # another process took the lock at the same time
            raise _held(self._files, found)
        failpoint("lease.after")
        self._heartbeat = _Heartbeat(self._files, me, self._beat_s)
        self._heartbeat.start()
        # The owner may be dropped without a close, for example in a notebook, and the next manager must get the lock.
        weakref.finalize(self, self._heartbeat.end)

    def _write(self, me: Holder, free: Holder | None) -> None:
        """Write the lock if it has not changed since it was found free."""
        with self._files.alone(self._lapse_s):
            found = read_holder(self._files)
            if found is not None and found != free:  # another process was faster
                raise _held(self._files, found)
            self._files.replace(LOCK_FILE, me.to_bytes())

    def _await_free(self, me: Holder) -> Holder | None:
        """Block until the lock is free; return its previous holder, or None."""
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
        """Raise FailedPreconditionError if another process holds the lock now: this process was taken for dead."""
        heartbeat = self._heartbeat
        if heartbeat is None:
            raise FailedPreconditionError(
                f"The directory {self._files.shown!r} must be locked before something is written there, it was given "
                "back. Make a new CheckpointManager."
            )
        found = read_holder(self._files)
        if found is not None and found.token != heartbeat.holder.token:
            raise _held(self._files, found)

    def release(self) -> None:
        """Release the lock. May be called twice."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.end()


def read_holder(files: DirectoryFiles) -> Holder | None:
    """Return the holder of a directory's lock, or None."""
    try:
        opened = files.open(LOCK_FILE)
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
class _Heartbeat:
    """A thread that increments the count of a lock. Keeps no reference to the `DirectoryLock`, which may be dropped."""

    def __init__(self, files: DirectoryFiles, holder: Holder, beat_s: float) -> None:
        self.holder = holder
        self._files = files
        self._beat_s = beat_s
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=_thread_name(holder), daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._beat_s):
            with contextlib.suppress(Exception):  # storage may fail now and work at the next increment
                self._beat()

    def _beat(self) -> None:
        found = read_holder(self._files)
        with self._lock:
            if not self._ended.is_set() and (found is None or found.token == self.holder.token):
                self.holder = replace(self.holder, beat=self.holder.beat + 1)
                self._files.replace(LOCK_FILE, self.holder.to_bytes())

    def end(self) -> None:
        """Stop the thread and release the lock. Idempotent and thread-safe."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        with self._lock:
            self._ended.set()
        # Exclusive access, so that a lock of another process is not removed. After a failure, the lock expires by
        # itself.
        with contextlib.suppress(Exception), self._files.alone(self._beat_s):
            found = read_holder(self._files)
            if found is not None and found.token == self.holder.token:
                self._files.remove(LOCK_FILE)
        if self._thread is not threading.current_thread():
            self._thread.join(self._beat_s)
