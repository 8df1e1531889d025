from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from raydist.collectives.reducer.interception import Interception


class Recorder:
    """Counts calls, and how deep they were nested."""

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.depth = 0

    def __call__(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.depth += 1
        self.depths.append(self.depth)
        original(*args, **kwargs)
        self.depth -= 1


def test_sees_every_way_to_call_it_and_then_no_more() -> None:
    original, recorder, x = torch.autograd.backward, Recorder(), torch.ones(2, requires_grad=True)
    with Interception(recorder):
        x.sum().backward()
        torch.autograd.backward(x.sum())
        torch.autograd.grad(x.sum(), x)
    x.sum().backward()
    assert recorder.depths == [1, 1]
    assert torch.autograd.backward is original
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_reentrant_segments_are_nested() -> None:
    recorder, x = Recorder(), torch.ones(2, requires_grad=True)
    with Interception(recorder):
        checkpoint(torch.sin, x * 2, use_reentrant=True).sum().backward()
    assert recorder.depths == [1, 2]


def test_threads_have_their_own() -> None:
    recorders = [Recorder(), Recorder()]
    inside = threading.Barrier(2)

    def main(recorder: Recorder) -> None:
        with Interception(recorder):
            inside.wait(10)
            torch.ones(1, requires_grad=True).sum().backward()
            inside.wait(10)

    threads = [threading.Thread(target=main, args=(recorder,)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [recorder.depths for recorder in recorders] == [[1], [1]]


def test_a_wrapper_that_came_later_is_left_in_place() -> None:
    original, x, seen = torch.autograd.backward, torch.ones(1, requires_grad=True), []

    def foreign(*args: Any, **kwargs: Any) -> None:
        seen.append(1)
        inner(*args, **kwargs)

    try:
        with Interception(Recorder()):
            inner = torch.autograd.backward
            torch.autograd.backward = foreign
        x.sum().backward()
        recorder = Recorder()
        with Interception(recorder):
            x.sum().backward()
        assert (seen, recorder.depths) == ([1, 1], [1])
        torch.autograd.backward = inner
        with Interception(Recorder()):
            pass
    finally:
        torch.autograd.backward = original


def test_steps_share_one_wrapper() -> None:
    """A new one for each would have torch disable its compiler for each."""
    installed = []
    for _ in range(2):
        with Interception(lambda original, args, kwargs: original(*args, **kwargs)):
            installed.append(torch.autograd.backward)
    assert installed[0] is installed[1]


def test_between_its_blocks_it_stays_in_place_and_does_nothing() -> None:
    original, recorder, x = torch.autograd.backward, Recorder(), torch.ones(1, requires_grad=True)
    interception = Interception(recorder)
    for _ in range(2):
        with interception:
            x.sum().backward()
            installed = torch.autograd.backward
        x.sum().backward()
        assert torch.autograd.backward is installed
    assert recorder.depths == [1, 1]
    interception.close()
    interception.close()
    assert torch.autograd.backward is original  # others of this process may have it wrapped


def test_what_was_there_before_is_put_back_between_two_blocks() -> None:
    """By a test of the program's with `mock.patch`, say."""
    original, recorder, x = torch.autograd.backward, Recorder(), torch.ones(1, requires_grad=True)
    interception = Interception(recorder)
    with interception:
        pass
    torch.autograd.backward = original
    with interception:
        x.sum().backward()
    assert recorder.depths == [1]
    interception.close()
    assert torch.autograd.backward is original
