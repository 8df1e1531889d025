from __future__ import annotations

import threading

import pytest

from raydist.collectives.shared_memory.spare_time import use_spare_time, while_waiting


def test_what_is_done_is_that_of_the_innermost_block() -> None:
    done: list[str] = []
    with while_waiting(lambda: done.append("outer")):
        with while_waiting(lambda: done.append("inner")):
            use_spare_time()
        use_spare_time()
    use_spare_time()
    assert done == ["inner", "outer"]


def test_a_block_that_fails_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), while_waiting(lambda: pytest.fail("left")):
        raise ZeroDivisionError
    use_spare_time()


def test_other_threads_have_their_own() -> None:
    with while_waiting(lambda: pytest.fail("another thread's")):
        thread = threading.Thread(target=use_spare_time)
        thread.start()
        thread.join(10)
