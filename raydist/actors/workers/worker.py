"""The InputWorker actor, which runs stages on blocks. Its calls return the results, so that the caller owns them."""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, final

import ray

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.actors.supervision import spoken_title
from raydist.actors.version_check import Software, installed_packages, require_same_software
from raydist.actors.workers.mapped_columns import StoredColumns
from raydist.actors.workers.memory_limit import keep_freed_memory, limit_memory
from raydist.actors.workers.result_recipes import leave_losses_to_caller
from raydist.actors.workers.stored_results import store_result
from raydist.core.errors import FailedPreconditionError, RaydistError
from raydist.core.exception_utils import LEAVING
from raydist.core.fork_guard import end_forked_child
from raydist.pipelines.elements.items import ElementError, StageResult
from raydist.pipelines.engine.kernel import StageSpec, join_results, run_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raydist.pipelines.elements.blocks import Block


_NAME = "raydist-exit-reason"
_MOST_BYTES = 4096


@final
class ExitReasonFile:
    """The pool's end of one worker's exit reason file. Closed with this object."""

    def __init__(self) -> None:
        self._fd: int | None = None
        try:
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        except (AttributeError, OSError):  # another system, or too many files
            return
        weakref.finalize(self, os.close, self._fd).atexit = False

    @property
    def path(self) -> str | None:
        """The path by which another process of this machine opens the file; None if there is no file."""
        return None if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> str:
        """Return the exit reason; "" if there is none."""
        if self._fd is None:
            return ""
        written = os.pread(self._fd, _MOST_BYTES, 0).decode(errors="replace")
        return written.partition("\n")[0].strip()


def write_exit_reason_to(path: str | None) -> bool:
    """Make this process write its exit reason to the file at `path`; return False if the file cannot be opened."""
    try:
        # A process id of another machine or container may name any process here.
        if path is None or _NAME not in os.readlink(path):
            return False
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    faulthandler.disable()  # Ray has enabled it for its log, after its own handlers
    faulthandler.enable(fd, all_threads=False)
    os._exit = functools.partial(_exit_with_reason, fd, os.getpid(), os._exit)
    return True


def _exit_with_reason(fd: int, pid: int, leave: Callable[[int], NoReturn], status: int) -> NoReturn:
    if os.getpid() == pid:  # the exit of a forked child is no failure
        os.write(fd, f"os._exit({status})\n".encode())
    leave(status)


@final
class PackedError(Exception):
    """A wrapper that carries a portable error in place of an element's error."""

    def __init__(self, packed: PortableError) -> None:
        super().__init__(packed)
        self.packed = packed


WorkerResult = StageResult | PortableError
"""A stage's result with packed errors; or the error of the whole block (a function that cannot be loaded, say)."""


@final
class InputWorker:
    """The class of the actor, which runs one block at a time. The actor keeps stages, so that each is sent once.

    Args:
        name: Name of the worker, for messages.
        memory_bytes: Memory that the worker may use beyond its present memory; None for the free memory.
    """

    def __init__(self, name: str, memory_bytes: int | None = None) -> None:
        self._name = name
        self._memory_bytes = memory_bytes
        self._specs: dict[bytes, StageSpec | Exception] = {}  # an error for a stage that cannot be loaded
        self._refusal: FailedPreconditionError | None = None

    def __repr__(self) -> str:
        return spoken_title(self._name)

    def hello(self, exit_reason: str | None = None, driver: Software | None = None) -> int:
        """Limit the process's memory, make malloc keep freed memory, and return the process id.

        Args:
            exit_reason: Path for the exit reason, see `write_exit_reason_to`.
            driver: Package versions of the driver; with other versions here, every block fails with an error.
        """
        write_exit_reason_to(exit_reason)
        self._refusal = None if driver is None else _misfit(driver, self._name)
        leave_losses_to_caller()
        self._memory_bytes = limit_memory(self._memory_bytes)
        keep_freed_memory(self._memory_bytes)
        return os.getpid()

    def node(self) -> str:
        """Return the id of this actor's Ray node."""
        return str(ray.get_runtime_context().get_node_id())

    def run(
        self, digest: bytes, spec: bytes | None, block: Block, starts: tuple[int, ...]
    ) -> tuple[WorkerResult, StoredColumns | None]:
        """Run the stage known as `digest` (its pickled `spec` comes with the first block) on a block.

        Returns:
            The answer, and the columns that the caller does not need: see `stored_results.py`.
        """
        pid = os.getpid()
        try:
            if self._refusal is not None:
                raise self._refusal
            if spec is not None:
                self._specs[digest] = _load(spec)
            known = self._specs[digest]
            if isinstance(known, Exception):
                raise known
            result = _run(known, block.in_memory(), starts)
            end_forked_child(pid, next((item.error for item in result.items if isinstance(item, ElementError)), None))
            return store_result(self._pack(result))
        except BaseException as error:  # no exception of a function may end the worker
            end_forked_child(pid, error)
            return pack_error(error, f"In {self._name}."), None

    def forget(self, digests: Sequence[bytes]) -> None:
        """Drop stages that will not be used again."""
        for digest in digests:
            self._specs.pop(digest, None)

    def _pack(self, result: StageResult) -> StageResult:
        items = tuple(
            replace(item, error=PackedError(pack_error(item.error, *self._notes(item.error))))
            if isinstance(item, ElementError)
            else item
            for item in result.items
        )
        return replace(result, items=items, worker=self._name)

    def _notes(self, error: Exception) -> list[str]:
        notes = [f"In {self._name}."]
        if isinstance(error, MemoryError) and self._memory_bytes is not None:
            notes.append(
                f"An input worker may take {self._memory_bytes:,} bytes (Options.input_worker_memory, or "
                '"memory" among the resources of an input worker; by default what is free when it starts).'
            )
        return notes


def _misfit(driver: Software, name: str) -> FailedPreconditionError | None:
    try:
        require_same_software(driver, [installed_packages()], [f"input worker {name}"])
    except FailedPreconditionError as error:
        return error
    return None


def _load(pickled: bytes) -> StageSpec | Exception:
    try:
        spec: StageSpec = pickle.loads(pickled)
    except Exception as error:  # a missing module, say
        return error
    return spec


def _run(spec: StageSpec, block: Block, starts: tuple[int, ...]) -> StageResult:
    """Do `run_stage`; a function that leaves the process (sys.exit, Ctrl-C) fails on that element only."""
    try:
        return run_stage(spec, block, starts)
    except LEAVING as error:
        if block.num_rows == 1:
            return _left(spec, starts[0], error)
    rows = [
        _run(spec, block.slice(row, row + 1), tuple(start + row for start in starts)) for row in range(block.num_rows)
    ]
    return join_results(spec, rows)


def _left(spec: StageSpec, index: int, error: BaseException) -> StageResult:
    labels = " or ".join(kernel.label for kernel in spec.kernels)
    failure = RaydistError(
        f"A function must not leave its process: {labels} raised {type(error).__name__}: {error}. Raise an Exception "
        "to make it this element's error."
    )
    failure.__cause__ = error
    num_kernels = len(spec.kernels)
    return StageResult((ElementError(failure, index),), (1,) * num_kernels, ("",) * num_kernels)


def unpack_result(result: WorkerResult) -> StageResult:
    """Return the result with the users' own errors in it; raise the error of a whole block."""
    if isinstance(result, PortableError):
        raise result.restore()
    items = tuple(
        replace(item, error=item.error.packed.restore())
        if isinstance(item, ElementError) and isinstance(item.error, PackedError)
        else item
        for item in result.items
    )
    return replace(result, items=items)
