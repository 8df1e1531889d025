"""Starting child processes from a thread that lasts: the kernel may tie them to the thread that started them.

Linux signals a child that asked for it (PR_SET_PDEATHSIG) when the *thread* that started it ends, not its process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["run_where_it_lasts"]


def run_where_it_lasts(start: Callable[[], None], await_end: Callable[[], None], *, name: str) -> None:
    """Call `start` in a thread that lasts as long as what it starts; returns, or raises, what it does.

    Args:
        start: Starts child processes.
        await_end: Returns when they have ended. A thread of our own calls it and ends then, or with the process; the
            main thread, which lasts anyway, does without.
        name: Of that thread.
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
