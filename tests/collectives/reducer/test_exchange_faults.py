"""A rank that is killed or stopped in the middle of a backward pass, while gradients travel."""

from __future__ import annotations

import copy
import itertools
import os
import re
import signal
import time
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.core.errors import DeadlineExceededError, RaydistError, UnavailableError
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.collectives.processes import ProcessTeam

pytestmark = pytest.mark.timeout(180)

WIDTH = 200
"""So that a layer's weights do not pass at once."""
NUM_LAYERS = 4
NUM_ROWS = 6


class Failure(NamedTuple):
    """What a survivor saw of the pass that failed."""

    seconds: float
    error: RaydistError
    num_sent: int
    is_unchanged: bool


class Replica:
    """One rank's model, and its gradients in a bucket a parameter."""

    def __init__(self, communicator: Communicator) -> None:
        generator = torch.Generator().manual_seed(7)
        self.group = communicator
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH)
        self.rows = torch.randn(communicator.world_size * NUM_ROWS, WIDTH, generator=generator)
        self.reducer = GradientReducer(communicator, bucket_bytes=1, first_bucket_bytes=1)
        self.reducer.attach(self.model.parameters())

    def backward(self) -> None:
        mine = self.rows[self.group.rank * NUM_ROWS :][:NUM_ROWS]
        with self.reducer.step(weight=1 / self.group.world_size):
            self.model(mine).square().mean().backward()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def expected(self) -> list[torch.Tensor]:
        """Of all rows at once."""
        alone = copy.deepcopy(self.model)
        alone.zero_grad()
        alone(self.rows).square().mean().backward()
        return [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]


def warm_up(communicator: Communicator) -> None:
    """A first pass alone: what torch imports in it takes newcomers a second, or several, of the limit of the others."""
    Replica(LocalGroup(LocalHub(), Membership("alone", 0, 0, 1), timeout_s=1.0)).backward()


def is_right(communicator: Communicator) -> bool:
    """Whether gradients are those of all rows, in the first pass and in the next."""
    replica, right = Replica(communicator), []
    for _ in range(2):
        replica.model.zero_grad()
        replica.backward()
        pairs = zip(replica.gradients(), replica.expected(), strict=True)
        right.append(all(torch.allclose(got, wanted, rtol=1e-4, atol=1e-7) for got, wanted in pairs))
    replica.reducer.close()
    return all(right)


class SecondPass:
    """A pass that ends well, and one in whose middle a rank may be struck, while its first buckets are under way."""

    def __init__(self, struck_by: signal.Signals | None = None) -> None:
        self.struck_by = struck_by

    def __call__(self, communicator: Communicator) -> Failure:
        replica = Replica(communicator)
        replica.backward()
        before = replica.gradients()
        with mock.patch.object(communicator, "all_reduce", wraps=communicator.all_reduce) as self.sending:
            replica.model[NUM_LAYERS // 2].register_full_backward_pre_hook(self.in_the_middle)
            start = time.monotonic()
            with pytest.raises(RaydistError) as caught:
                replica.backward()
            seconds = time.monotonic() - start
        after = replica.gradients()
        unchanged = len(after) == len(before) and all(map(torch.equal, after, before))
        replica.reducer.close()
        return Failure(seconds, caught.value, self.num_sent, unchanged)

    def in_the_middle(self, module: nn.Module, gradient: object) -> None:
        self.num_sent = self.sending.call_count
        if self.struck_by is not None and self.num_sent > 0:
            os.kill(os.getpid(), self.struck_by)


OFTEN = [("shm", signal.SIGKILL, 0)]
EVERY = list(itertools.product(("shm", "hierarchical", "gloo"), (signal.SIGKILL, signal.SIGSTOP), (0, 2)))


@pytest.mark.parametrize(
    ("backend", "struck_by", "victim"),
    [pytest.param(*each, marks=[] if each in OFTEN else pytest.mark.long) for each in EVERY],
)
def test_survivors_are_told_who_is_missing_and_go_on_without_it(
    request: pytest.FixtureRequest, backend: str, struck_by: signal.Signals, victim: int
) -> None:
    team: ProcessTeam = request.getfixturevalue(f"{backend}_team")
    team.run(warm_up)
    kind, limit_s = (
        (UnavailableError, team.timeout_s * 0.9)
        if struck_by == signal.SIGKILL
        else (DeadlineExceededError, team.timeout_s + 2.0)
    )
    survivors = [rank for rank in range(team.world_size) if rank != victim]
    team.begin({victim: SecondPass(struck_by)})
    failures: dict[int, Failure] = team.begin(dict.fromkeys(survivors, SecondPass()))()
    team.kill(victim)
    with team.without_the_dead():
        assert team.run(is_right) == [True] * len(survivors)
    for failure in failures.values():
        assert isinstance(failure.error, kind), failure
        assert re.search(rf"No sign of rank {victim}\.|rank {victim} is gone\.", str(failure.error)), failure.error
        assert failure.seconds < limit_s
        assert 0 < failure.num_sent < 2 * NUM_LAYERS
        assert failure.is_unchanged
