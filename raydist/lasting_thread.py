"""Start child processes from a thread that outlives them: the kernel may tie a child to its parent thread.

Linux signals a child with PR_SET_PDEATHSIG when the *thread* that started it ends, not the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["run_where_it_lasts"]


def run_where_it_lasts(start: Callable[[], None], await_end: Callable[[], None], *, name: str) -> None:
    """Call `start` in a thread that lasts as long as the started processes; return, or raise, once `start` has ended.

    Args:
        start: Starts child processes.
        await_end: Returns when the processes have ended. Called in the new thread, which ends then, or with the
            process. Not called if this is the main thread, which needs no other thread.
        name: Name of the new thread.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    started: Future[None] = Future()
    threading.Thread(target=_run, args=(start, await_end, started), name=name, daemon=True).start()
    started.result()


def _run(start: Callable[[], None], await_end: Callable[[], None], started: Future[None]) -> None:
    try:
        start()
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(None)
    await_end()
