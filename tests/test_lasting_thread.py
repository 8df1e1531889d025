from __future__ import annotations

import threading

import pytest

from raydist.cluster.nodes import run_where_it_lasts


def in_a_thread(fn: object) -> None:
    thread = threading.Thread(target=fn)  # type: ignore[arg-type]  # a function without arguments
    thread.start()
    thread.join()


def test_the_main_thread_starts_things_itself() -> None:
    seen: list[threading.Thread] = []
    run_where_it_lasts(lambda: seen.append(threading.current_thread()), lambda: pytest.fail("waited"), name="keeper")
    assert seen == [threading.main_thread()]


def test_a_thread_leaves_it_to_one_that_lasts_until_the_end() -> None:
    seen: list[threading.Thread] = []
    ended = threading.Event()

    def start() -> None:
        seen.append(threading.current_thread())

    in_a_thread(lambda: run_where_it_lasts(start, lambda: (ended.wait(10), None)[1], name="keeper"))
    (keeper,) = seen
    assert (keeper.name, keeper.is_alive(), keeper.daemon) == ("keeper", True, True)
    ended.set()
    keeper.join(10)
    assert not keeper.is_alive()


def test_errors_are_raised_where_it_was_asked_for() -> None:
    caught: list[str] = []

    def fail() -> None:
        raise OSError("no room")

    def ask() -> None:
        with pytest.raises(OSError, match="no room") as error:
            run_where_it_lasts(fail, lambda: None, name="keeper")
        caught.append(str(error.value))

    in_a_thread(ask)
    assert caught == ["no room"]
