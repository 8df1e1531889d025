"""What every communicator must do: collectives against numpy, limits, aborts, deaths and new generations.

An implementation gives a :class:`Team` whose ranks run functions of this module. `CHECKS` are all checks; they may be
called one by one, in any order. Tensors are made on torch's default device, which a team sets to its ranks' own.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from raydist.collectives.base import Communicator, Work
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    RaydistError,
    UnavailableError,
)
from raydist.core.values import ReduceOp

Body = Callable[[Communicator], Any]

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
WHOLE = tuple(dtype for dtype in DTYPES if not (dtype.is_floating_point or dtype.is_complex))


class Team(ABC):
    """The ranks 0 .. world_size - 1 of a group, in the hands of a test. World size >= 3, limit of a few seconds."""

    world_size: int
    timeout_s: float

    @abstractmethod
    def begin(self, bodies: Mapping[int, Body]) -> Callable[[], dict[int, Any]]:
        """Start one function on each of these ranks; the returned function waits for results (or errors, as values)."""

    @abstractmethod
    def kill(self, rank: int) -> None:
        """End a rank without a goodbye."""

    @abstractmethod
    def reform(self) -> None:
        """A new generation: newcomers take the places of those that were killed, the others open the group anew."""

    def run(self, body: Body) -> list[Any]:
        """Run on all ranks; the first error is raised."""
        results = self.begin(dict.fromkeys(range(self.world_size), body))()
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return [results[rank] for rank in range(self.world_size)]


def brought(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: small numbers whose sums and products every dtype holds exactly."""
    return (torch.arange(6).reshape(2, 3) % 3 + rank % 3).to(dtype)


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return tensor.to(wide).cpu().numpy()


# --- reductions -------------------------------------------------------------------------------------------------------

REDUCERS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.mean,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
    ReduceOp.PRODUCT: np.prod,
}


def meaningful(op: ReduceOp, dtype: torch.dtype) -> bool:
    if op is ReduceOp.MEAN:
        return dtype not in WHOLE
    if op is ReduceOp.SUM:
        return dtype is not torch.bool
    return not dtype.is_complex


CASES = [(op, dtype) for op in ReduceOp for dtype in DTYPES if meaningful(op, dtype)]


def reduce_everything(communicator: Communicator) -> list[Any]:
    """all_reduce for every case."""
    results = []
    for op, dtype in CASES:
        everywhere = brought(communicator.rank, dtype)
        communicator.all_reduce(everywhere, op).wait()
        results.append(as_array(everywhere))
    return results


def check_reductions(team: Team) -> None:
    """Every op and dtype, against numpy."""
    for of_rank in team.run(reduce_everything):
        for (op, dtype), everywhere in zip(CASES, of_rank, strict=True):
            tolerance = 1e-2 if dtype.itemsize == 2 else 1e-6
            expected = reduced(op, dtype, team.world_size)
            np.testing.assert_allclose(everywhere, expected, rtol=tolerance, err_msg=f"all_reduce {op} {dtype}")


def reduced(op: ReduceOp, dtype: torch.dtype, world_size: int) -> Any:
    result = REDUCERS[op](np.stack([as_array(brought(rank, dtype)) for rank in range(world_size)]), axis=0)
    if dtype is torch.bool:
        return result.astype(bool).astype(float)
    # The product of many ranks leaves the small integers, and wraps.
    return as_array(torch.from_numpy(result).to(torch.int64).to(dtype)) if dtype in WHOLE else result


# --- moving tensors ---------------------------------------------------------------------------------------------------


def move_everything(communicator: Communicator) -> list[Any]:
    """broadcast from the last rank, and all_gather, for every dtype."""
    rank, size = communicator.rank, communicator.world_size
    results = []
    for dtype in DTYPES:
        told = brought(rank, dtype)
        communicator.broadcast(told, size - 1).wait()
        gathered = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
        communicator.all_gather(gathered, brought(rank, dtype)).wait()
        results.append((as_array(told), [as_array(part) for part in gathered]))
    communicator.barrier()
    return results


def check_moves(team: Team) -> None:
    """Every dtype arrives as it was sent."""
    for of_rank in team.run(move_everything):
        for dtype, (told, gathered) in zip(DTYPES, of_rank, strict=True):
            np.testing.assert_array_equal(told, as_array(brought(team.world_size - 1, dtype)))
            for source, part in enumerate(gathered):
                np.testing.assert_array_equal(part, as_array(brought(source, dtype)))


def collect_rows(communicator: Communicator) -> list[Any]:
    """all_gather_rows where rank r has r rows, of small and large tensors of several dtypes."""
    rank, size = communicator.rank, communicator.world_size
    results = []
    for dtype in (torch.float64, torch.bfloat16, torch.bool):
        for width in (1, 5, 70_001):
            rows = [torch.zeros(place, width, dtype=dtype) for place in range(size)]
            communicator.all_gather_rows(rows, torch.full((rank, width), rank % 2, dtype=dtype)).wait()
            results.append([as_array(part).mean(1).tolist() for part in rows])
    return results


def check_rows(team: Team) -> None:
    """Rows of different numbers arrive everywhere."""
    for results in team.run(collect_rows):
        for rows in results:
            assert rows == [[source % 2] * source for source in range(team.world_size)]


def exchange_rows(communicator: Communicator) -> list[Any]:
    """all_to_all_rows where rank i sends i * j rows to rank j: the first rank neither sends nor receives any."""
    rank, size = communicator.rank, communicator.world_size
    results = []
    for factor in (1, 0):
        lengths = [[factor * one * other for other in range(size)] for one in range(size)]
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            for width in ((), (1,), (7_001,)):
                inputs = [torch.full((lengths[rank][to], *width), 10 * rank + to, dtype=dtype) for to in range(size)]
                outputs = [torch.zeros((lengths[source][rank], *width), dtype=dtype) for source in range(size)]
                communicator.all_to_all_rows(outputs, inputs, lengths).wait()
                rows = [as_array(part).reshape(len(part), max(1, math.prod(width))) for part in outputs]
                results.append([sorted({*row.tolist()}) for part in rows for row in part])
    return results


def check_exchanged_rows(team: Team) -> None:
    """Each rank gets the rows that were meant for it, also where some ranks, or all, have none."""
    for rank, results in enumerate(team.run(exchange_rows)):
        expected = [[10 * source + rank] for source in range(team.world_size) for _ in range(source * rank)]
        assert results == [*([expected] * 9), *([[]] * 9)]


def odd_tensors(communicator: Communicator) -> list[Any]:
    rank, size = communicator.rank, communicator.world_size
    strided = torch.arange(6.0).reshape(2, 3).t() + rank
    communicator.all_reduce(strided, ReduceOp.SUM).wait()
    scalar = torch.tensor(float(rank))
    communicator.all_reduce(scalar, ReduceOp.MAX).wait()
    empty = torch.zeros(0, 3)
    communicator.all_reduce(empty, ReduceOp.SUM).wait()
    rows = torch.zeros(size, 4)[:, ::2]
    communicator.all_gather(list(rows), torch.full((2,), float(rank))).wait()
    leaf = torch.full((2,), float(rank), requires_grad=True)
    communicator.all_reduce(leaf, ReduceOp.SUM).wait()
    return [strided.tolist(), scalar.item(), tuple(empty.shape), rows.tolist(), leaf.tolist(), leaf.requires_grad]


def check_tensor_kinds(team: Team) -> None:
    """Strided views, scalars, tensors without elements, leaves of a graph."""
    size, total = team.world_size, sum(range(team.world_size))
    expected_strided = (np.arange(6.0).reshape(2, 3).T * size + total).tolist()
    rows = [[float(rank)] * 2 for rank in range(size)]
    for result in team.run(odd_tensors):
        assert result == [expected_strided, size - 1, (0, 3), rows, [float(total)] * 2, True]


def means_of_large_halves(communicator: Communicator) -> list[list[float]]:
    results = []
    for width in (3, 20_001, 70_001):
        tensor = torch.full((width,), 60_000.0, dtype=torch.float16)
        communicator.all_reduce(tensor, ReduceOp.MEAN).wait()
        results.append(tensor.unique().tolist())
    return results


def check_means_of_halves(team: Team) -> None:
    """The mean of numbers of 16 bits is there where their sum is beyond all of them, of small and large tensors."""
    assert team.run(means_of_large_halves) == [[[60_000.0]] * 3] * team.world_size


def extremes_of_nan(communicator: Communicator) -> list[Any]:
    """The least and the greatest of -1 - rank, where each rank in turn has a NaN, in each place in turn."""
    results = []
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            for place in range(2 * communicator.world_size):
                tensor = torch.full((2 * communicator.world_size,), -1.0 - communicator.rank, dtype=dtype)
                if place % communicator.world_size == communicator.rank:
                    tensor[place] = float("nan")
                communicator.all_reduce(tensor, op).wait()
                results.append((op, place, tensor.isnan().nonzero().flatten().tolist(), tensor.nansum().item()))
    return results


def check_nan(team: Team) -> None:
    """A NaN is the least and the greatest of numbers, wherever it comes from."""
    others = 2 * team.world_size - 1
    for results in team.run(extremes_of_nan):
        for op, place, found, rest in results:
            assert (found, rest) == ([place], -others * (1.0 if op is ReduceOp.MAX else team.world_size))


def gather_from_another_place(communicator: Communicator) -> list[Any]:
    """all_gather of a tensor that is the place of what rank 0 brings."""
    results = []
    for width in (3, 70_001):
        rows = torch.zeros(communicator.world_size, width)
        rows[0] = communicator.rank + 1
        communicator.all_gather(list(rows), rows[0]).wait()
        results.append([row.unique().tolist() for row in rows])
    return results


def check_gathered_in_place(team: Team) -> None:
    """What a rank brings has been read before its memory is written, whatever else is to be there."""
    assert (
        team.run(gather_from_another_place)
        == [[[[rank + 1.0] for rank in range(team.world_size)]] * 2] * team.world_size
    )


def several_at_once(communicator: Communicator) -> list[float]:
    tensors = [torch.full((1000,), float(communicator.rank + k)) for k in range(4)]
    works: list[Work] = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        work.wait()  # once more does nothing
    return [tensor[999].item() for tensor in tensors]


def check_asynchronous(team: Team) -> None:
    """Several collectives may be under way; they may be waited for in any order, and twice."""
    total = sum(range(team.world_size))
    assert team.run(several_at_once) == [[float(total + k * team.world_size) for k in range(4)]] * team.world_size


def sums_of_allocated(communicator: Communicator) -> list[Any]:
    sizes = [(5, torch.float32), (0, torch.float32), (70_000, torch.float64), (3, torch.int64)]
    tensors = communicator.allocate(sizes)
    kinds = [(tensor.numel(), tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    results = []
    for round_ in range(3):
        for k, tensor in enumerate(tensors):
            tensor.fill_(communicator.rank + k + round_)
        works = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
        for work in works:
            work.wait()
        results.append([tensor.unique().tolist() for tensor in tensors])
    return [kinds == [(numel, dtype, (numel,)) for numel, dtype in sizes], *results]


def check_allocated(team: Team) -> None:
    """Memory of the group's own is of the asked size and dtype, and may be reduced again and again."""
    size, total = team.world_size, sum(range(team.world_size))
    rounds = [[[total + (k + round_) * size] if k != 1 else [] for k in range(4)] for round_ in range(3)]
    assert team.run(sums_of_allocated) == [[True, *rounds]] * size


# --- errors -----------------------------------------------------------------------------------------------------------


def refused_reductions(communicator: Communicator) -> list[str]:
    cases = [(ReduceOp.MEAN, torch.int64), (ReduceOp.SUM, torch.bool), (ReduceOp.MIN, torch.complex64)]
    cases += [(ReduceOp.SUM, torch.uint64), (ReduceOp.MAX, torch.float8_e4m3fn)]
    messages = []
    for op, dtype in cases:
        with pytest.raises(InvalidArgumentError) as caught:
            communicator.all_reduce(torch.ones(2).to(dtype), op)
        messages.append(str(caught.value))
    too_many = [torch.ones(2) for _ in range(communicator.world_size + 1)]
    for parts in (too_many, too_many[:-2], [*too_many[:-2], torch.ones(3)]):
        with pytest.raises(InvalidArgumentError, match="one a rank"):
            communicator.all_gather(parts, torch.ones(2))
    for root in (communicator.world_size, -1):
        with pytest.raises(InvalidArgumentError, match=r"must be a rank of group .*, 0 to \d, got"):
            communicator.broadcast(torch.ones(1), root)
    communicator.barrier()
    return messages


def check_refusals(team: Team) -> None:
    """What has no meaning is refused before anything is sent, and the group goes on."""
    for messages in team.run(refused_reductions):
        named = ["torch.int64", "torch.bool", "complex64", "torch.uint64", "float8_e4m3fn"]
        assert [name in message for name, message in zip(named, messages, strict=True)] == [True] * 5


def sum_of_ones(communicator: Communicator) -> float:
    tensor = torch.ones(3)
    communicator.all_reduce(tensor, ReduceOp.SUM).wait()
    return tensor[2].item()


def late_sum(communicator: Communicator) -> float:
    """Come once rank 1 has lost its patience."""
    time.sleep(0.3)
    return sum_of_ones(communicator)


def impatient_sum(communicator: Communicator) -> float:
    tensor = torch.ones(3)
    work = communicator.all_reduce(tensor, ReduceOp.SUM)
    with pytest.raises(DeadlineExceededError, match=r"0\.05"):
        work.wait(0.05)
    work.wait()
    return tensor[2].item()


def check_short_limit(team: Team) -> None:
    """A wait's own limit ends the wait, not the work."""
    bodies = dict.fromkeys(range(team.world_size), sum_of_ones) | {0: late_sum, 1: impatient_sum}
    assert set(team.begin(bodies)().values()) == {float(team.world_size)}


def timed_failure(communicator: Communicator) -> tuple[float, RaydistError]:
    """Seconds until a collective failed, and how."""
    start = time.monotonic()
    with pytest.raises(RaydistError) as caught:
        sum_of_ones(communicator)
    return time.monotonic() - start, caught.value


def check_hard_limit(team: Team) -> None:
    """A rank that does not come: an error on all others when the group's limit is over, and a new generation works."""
    waiting = dict.fromkeys(range(1, team.world_size), timed_failure)
    for rank, (seconds, error) in team.begin(waiting)().items():
        assert isinstance(error, DeadlineExceededError), error
        assert team.timeout_s * 0.5 < seconds < team.timeout_s + 2.0
        assert f"rank {rank} of {team.world_size}" in str(error)
        assert "all_reduce" in str(error)
        assert "No sign of rank 0." in str(error)
    team.reform()
    check_asynchronous(team)


def abort_while_waiting(communicator: Communicator) -> tuple[float, RaydistError]:
    timer = threading.Timer(0.1, communicator.abort)
    timer.start()
    result = timed_failure(communicator)
    timer.join()
    return result


def fail_soon(communicator: Communicator) -> tuple[float, RaydistError]:
    """A collective that the others were in when they gave up may still succeed; the next one may not."""
    with contextlib.suppress(CancelledError):
        sum_of_ones(communicator)
    return timed_failure(communicator)


def check_abort(team: Team) -> None:
    """`abort` from another thread ends pending and later collectives of every rank."""
    waiting = dict.fromkeys(range(2, team.world_size), timed_failure) | {1: abort_while_waiting}
    outcomes = list(team.begin(waiting)().values()) + [team.begin({0: fail_soon})()[0]]
    for seconds, error in outcomes:
        assert isinstance(error, CancelledError), error
        assert "rank 1" in str(error)
        assert seconds < team.timeout_s * 0.9
    team.reform()
    check_asynchronous(team)


def check_death(team: Team) -> None:
    """A rank dies: every other one learns it long before the limit, and goes on with a newcomer."""
    dead = team.world_size - 1
    team.run(sum_of_ones)
    failures = team.begin(dict.fromkeys(range(dead), timed_failure))
    team.kill(dead)
    for seconds, error in failures().values():
        assert isinstance(error, UnavailableError), error
        assert seconds < team.timeout_s * 0.9
    team.reform()
    check_reductions(team)


CHECKS: tuple[Callable[[Team], None], ...] = (
    check_reductions,
    check_moves,
    check_rows,
    check_exchanged_rows,
    check_tensor_kinds,
    check_means_of_halves,
    check_nan,
    check_gathered_in_place,
    check_asynchronous,
    check_allocated,
    check_refusals,
    check_short_limit,
    check_hard_limit,
    check_abort,
    check_death,
)
"""Everything; each leaves the team usable."""
