from __future__ import annotations

import dataclasses
import os

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.serving.served_slices import ServedSlices
from raydist.parameter_servers.shared_slices import SharedSlices
from tests.parameter_servers.served import served, slice_of


def test_values_are_read_into_what_is_there() -> None:
    slices = slice_of(1, 2, 3), slice_of(2, dtype=torch.int64), slice_of(5, 0, 4)
    with served(*slices) as mine:
        reader = SharedSlices.open(mine.address)
        parameter = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64).t())
        count = torch.tensor(7)
        address, version = parameter.data_ptr(), parameter._version
        with mine.changing():
            mine.value(1).copy_(torch.arange(6.0).view(2, 3))
            mine.value(2).fill_(9)
        assert reader.version == 2
        assert reader.read_into({1: parameter, 2: count, 5: torch.empty(0, 4)}, timeout_s=1) == 2
        assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert count.item() == 9
        assert parameter.data_ptr() == address
        assert parameter._version > version
        reader.close()
        reader.close()


def test_what_is_known_is_not_read_again() -> None:
    with served(slice_of(1, 2)) as mine:
        reader = SharedSlices.open(mine.address)
        target = torch.ones(2, dtype=torch.float64)
        assert reader.read_into({1: target}, unless_version=mine.version, timeout_s=1) is None
        assert target.tolist() == [1, 1]
        assert reader.read_into({1: target}, unless_version=mine.version - 1, timeout_s=1) == mine.version
        assert reader.read_into({}, timeout_s=1) == mine.version
        reader.close()


def test_slices_that_came_later_need_another_look() -> None:
    with served(slice_of(1, 2)) as mine:
        early = SharedSlices.open(mine.address)
        mine.create([slice_of(2, 3)], [torch.ones(3, dtype=torch.float64)])
        target = torch.zeros(3, dtype=torch.float64)
        with pytest.raises(rd.InvalidArgumentError, match=r"among 1 known ones, got 2. Ask the server where"):
            early.read_into({2: target}, timeout_s=1)
        late = SharedSlices.open(mine.address)
        assert (sorted(early.slices), sorted(late.slices)) == ([1], [1, 2])
        late.read_into({2: target}, timeout_s=1)
        assert target.tolist() == [1, 1, 1]
        early.close()
        late.close()


def test_what_cannot_be_seen_is_told() -> None:
    with served() as mine:
        elsewhere = dataclasses.replace(mine.address, head="/proc/1/fd/99999")
        with pytest.raises(rd.UnavailableError, match=r"server 0 .* Pull them from the server instead"):
            SharedSlices.open(elsewhere)


READERS, READS, VERSIONS, EXTENT = 2, 5_000, 10, 3_000


def read_often(mine: ServedSlices, reads: int) -> None:
    """In a forked child: every value must be that of the version that was read."""
    reader = SharedSlices.open(mine.address)
    targets = {1: torch.empty(EXTENT, dtype=torch.float64), 2: torch.empty(EXTENT, dtype=torch.float64)}
    last, count = 0, 0
    while count < reads or last <= VERSIONS:  # a writer that got no core has written few so far
        version = reader.read_into(targets, timeout_s=30)
        assert version is not None
        assert version >= last
        for target in targets.values():
            assert (target == version).all(), (version, target)
        last, count = version, count + 1


def test_no_read_of_another_process_is_torn() -> None:
    with served(slice_of(1, EXTENT), slice_of(2, EXTENT)) as mine:
        write(mine)
        children = [fork_reader(mine) for _ in range(READERS)]
        running = dict.fromkeys(children, -1)
        while -1 in running.values():
            write(mine)
            for child in [child for child, code in running.items() if code == -1]:
                done, status = os.waitpid(child, os.WNOHANG)
                running[child] = os.waitstatus_to_exitcode(status) if done else -1
        assert set(running.values()) == {0}


def write(mine: ServedSlices) -> None:
    with mine.changing():
        mine.value(1).fill_(mine.version + 1)
        mine.value(2).fill_(mine.version + 1)


def fork_reader(mine: ServedSlices) -> int:
    child = os.fork()
    if child == 0:
        try:
            read_often(mine, READS)
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    return child
