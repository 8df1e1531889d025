from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from raydist.collectives.reducer.interception import Handler, begin_interception, end_interception


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


@contextmanager
def intercepted(handler: Handler) -> Iterator[None]:
    token = begin_interception(handler)
    try:
        yield
    finally:
        end_interception(token)


def test_sees_every_way_to_call_it_and_then_no_more() -> None:
    recorder, x = Recorder(), torch.ones(2, requires_grad=True)
    for _ in range(2):
        with intercepted(recorder):
            x.sum().backward()
            torch.autograd.backward(x.sum())
            torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    assert recorder.depths == [1] * 4
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


def test_reentrant_segments_are_nested() -> None:
    recorder, x = Recorder(), torch.ones(2, requires_grad=True)
    with intercepted(recorder):
        checkpoint(torch.sin, x * 2, use_reentrant=True).sum().backward()
    assert recorder.depths == [1, 2]


def test_threads_have_their_own() -> None:
    recorders = [Recorder(), Recorder()]
    inside = threading.Barrier(2)

    def main(recorder: Recorder) -> None:
        with intercepted(recorder):
            inside.wait(10)
            torch.ones(1, requires_grad=True).sum().backward()
            inside.wait(10)

    threads = [threading.Thread(target=main, args=(recorder,)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [recorder.depths for recorder in recorders] == [[1], [1]]


def test_steps_share_one_wrapper_also_where_other_code_restores_the_original() -> None:
    """By `mock.patch`, say. A new one for each would have torch disable its compiler for each."""
    recorder, x, original = Recorder(), torch.ones(1, requires_grad=True), torch.autograd.backward
    installed = []
    try:
        for _ in range(2):
            with intercepted(recorder):
                x.sum().backward()
                installed.append(torch.autograd.backward)
            torch.autograd.backward = original
    finally:
        torch.autograd.backward = original
    assert recorder.depths == [1, 1]
    assert installed[0] is installed[1]


def test_a_wrapper_that_came_later_is_called_too() -> None:
    original, x, seen = torch.autograd.backward, torch.ones(1, requires_grad=True), []

    def foreign(*args: Any, **kwargs: Any) -> None:
        seen.append(1)
        inner(*args, **kwargs)

    try:
        with intercepted(Recorder()):
            inner = torch.autograd.backward
            torch.autograd.backward = foreign
        x.sum().backward()
        recorder = Recorder()
        with intercepted(recorder):
            x.sum().backward()
        assert (seen, recorder.depths[0]) == ([1, 1], 1)
    finally:
        torch.autograd.backward = original
