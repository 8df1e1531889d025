from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

import raydist as rd
from raydist.parameter_servers.slices_head import HEAD_BYTES, SlicesHead
from raydist.shared_segment import Segment
from tests.forks import in_a_forked_child


@pytest.fixture
def ends() -> Iterator[tuple[SlicesHead, SlicesHead]]:
    """The server's end and a reader's."""
    segment = Segment.create_nameless(HEAD_BYTES)
    segment.hold(0)
    server = SlicesHead(segment, 3)
    reader = end_of(segment)
    yield server, reader
    reader.close()
    server.close()


Ends = tuple[SlicesHead, SlicesHead]


def test_each_change_is_a_version(ends: Ends) -> None:
    server, reader = ends
    with server.writing(timeout_s=1):
        server.note_step(4)
        assert reader.version == 0
    assert (reader.version, reader.step) == (1, 4)
    with pytest.raises(KeyError), server.writing(timeout_s=1):
        raise KeyError
    with reader.reading(timeout_s=1) as version:
        assert version == 2


def test_a_reader_waits_for_the_server(ends: Ends) -> None:
    server, reader = ends
    with server.writing(timeout_s=1), pytest.raises(rd.DeadlineExceededError, match=r"server 3 .* within 0.02 s"):
        reader.reading(timeout_s=0.02).__enter__()
    with reader.reading(timeout_s=0):
        pass


def test_the_server_waits_for_readers_and_goes_first(ends: Ends) -> None:
    server, reader = ends
    order: list[str] = []

    def write() -> None:
        with server.writing(timeout_s=10):
            order.append("written")

    with reader.reading(timeout_s=1):
        with pytest.raises(rd.DeadlineExceededError), server.writing(timeout_s=0.02):
            pass
        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(0.05)
        order.append("read")
    with reader.reading(timeout_s=10) as version:  # though it asks at once: the server has said that it wants to write
        assert version == 1
    writer.join(10)
    assert order == ["read", "written"]


def test_threads_of_one_end_take_turns(ends: Ends) -> None:
    server, reader = ends
    with reader.reading(timeout_s=1):
        seen: list[Exception] = []

        def read() -> None:
            try:
                reader.reading(timeout_s=0.02).__enter__()
            except rd.DeadlineExceededError as error:
                seen.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(10)
        assert len(seen) == 1
        with pytest.raises(rd.DeadlineExceededError), server.writing(timeout_s=0.02):
            pass


def end_of(segment: Segment) -> SlicesHead:
    return SlicesHead(Segment.open(segment.name, HEAD_BYTES, segment.token), 3)


def test_a_server_that_died_while_it_wrote_is_told() -> None:
    segment = Segment.create_nameless(HEAD_BYTES)
    reader = end_of(segment)

    def serve() -> None:
        theirs = Segment.open(segment.name, HEAD_BYTES, segment.token)
        theirs.hold(0)
        with SlicesHead(theirs, 3).writing(timeout_s=1):
            os._exit(0)

    assert in_a_forked_child(serve) == 0
    with pytest.raises(rd.UnavailableError, match=r"server 3 must live .* Restore from a checkpoint"):
        reader.reading(timeout_s=10).__enter__()
    reader.close()
    segment.close()


def test_a_reader_that_died_stands_in_nobodys_way(ends: Ends) -> None:
    server, reader = ends

    def read() -> None:
        with end_of(server._segment).reading(timeout_s=1):
            os._exit(0)

    assert in_a_forked_child(read) == 0
    with server.writing(timeout_s=1):
        pass
    assert reader.version == 1
