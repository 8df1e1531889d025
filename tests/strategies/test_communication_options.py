"""What `CommunicationOptions` asks for happens on running replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

Seen = tuple[bool, int, set[float]]
"""Whether gloo has threads here, how many buckets a backward pass has, and the gradients."""


def seen_on_replicas(options: rd.CommunicationOptions) -> tuple[Seen, ...]:
    """Of two layers of 400 bytes, whose gradients are 2/9 on one replica and 0 on the other."""
    with rd.MirroredStrategy(["CPU:0", "CPU:1"], communication_options=options) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(1, 100, bias=False), nn.Linear(100, 1, bias=False))

        def step() -> Seen:
            share = 2 / 9 if rd.get_replica_context().replica_id_in_sync_group == 0 else 0.0
            model.zero_grad()
            with torch.profiler.profile(acc_events=True) as profile:
                (share * torch.cat([parameter.flatten() for parameter in model.parameters()])).sum().backward()
            buckets = {event.key for event in profile.key_averages() if event.key.startswith("raydist::bucket")}
            found = [parameter.grad for parameter in model.parameters()]
            gradients = {value for gradient in found if gradient is not None for value in gradient.flatten().tolist()}
            threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
            return any("gloo" in name for name in threads), len(buckets), gradients

        strategy.run(step)  # the first pass has one bucket for all
        return strategy.local_results(strategy.run(step))


@pytest.mark.parametrize(
    ("options", "has_gloo", "num_buckets", "gradient"),
    [
        (rd.CommunicationOptions(), False, 1, torch.tensor(1 / 9).item()),
        (rd.CommunicationOptions(implementation="gloo", bytes_per_pack=500), True, 2, torch.tensor(1 / 9).item()),
        (rd.CommunicationOptions(compression="fp16"), False, 1, torch.tensor(1 / 9).half().item()),
        (rd.CommunicationOptions(compression="bf16"), False, 1, torch.tensor(1 / 9).bfloat16().item()),
    ],
    ids=["defaults", "gloo-in-small-packs", "fp16", "bf16"],
)
def test_replicas_do_as_they_are_asked(
    ray_cluster: None, options: rd.CommunicationOptions, has_gloo: bool, num_buckets: int, gradient: float
) -> None:
    for seen in seen_on_replicas(options):
        assert seen == (has_gloo, num_buckets, {gradient})
