"""TPUStrategy on hosts without TPUs: raylets with a slice's labels, and a stand-in for torch_xla.

`make test-xla` runs the same with torch_xla itself, on XLA's CPU devices.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.strategies.tpu import TpuRequest
from raydist.testing.strategy_contract import CHECKS, check_closing, check_program
from raydist.testing.training_program import Program
from raydist.tpu_slices.inventory import SliceShape
from tests.checkpoints.loops.training import TrainingOptions, check_preemption_at_a_draw, check_saves_after_draws
from tests.contracts.exchange_program import check_exchanges
from tests.xla_world import IS_REAL, TPU_LIMIT_S

pytestmark = pytest.mark.timeout(TPU_LIMIT_S)
TWO_HOSTS = pytest.mark.skipif(IS_REAL, reason="XLA's CPU devices are one host's, in one process")


# The first test of this file: `tpu`, of the next ones, has the slice until the last has ended.
@pytest.mark.ray
@TWO_HOSTS
@pytest.mark.long
def test_a_host_that_is_stopped_is_an_error_within_the_limits(tpu_slices: None) -> None:
    limits = rd.Timeouts(start_s=60, collective_s=5, step_s=60, close_s=5)
    check_a_host_that_is_gone(rd.TPUStrategy(accelerator_version="v4", timeouts=limits), signal.SIGSTOP)


def check_a_host_that_is_gone(strategy: rd.TPUStrategy, how: signal.Signals) -> None:
    """It is an error soon; the strategy is at its end."""
    try:
        with strategy.scope():
            model = nn.Linear(1, 1)

        def step() -> int:
            model(torch.ones(1, 1, device=rd.get_replica_context().device)).sum().backward()
            return os.getpid()

        def train() -> None:
            for _ in range(50):
                strategy.local_results(strategy.run(step))

        *_, target = strategy.local_results(strategy.run(step))
        os.kill(target, how)
        start = time.monotonic()
        try:
            with pytest.raises((rd.UnavailableError, rd.DeadlineExceededError), match=r"replica|rank"):
                train()
            assert time.monotonic() - start < 30
        finally:
            if how is signal.SIGSTOP:
                os.kill(target, signal.SIGCONT)
    finally:
        strategy._abort(fetch=False)


@pytest.mark.ray
@pytest.mark.skipif(IS_REAL, reason="each of its programs would be compiled for XLA: not tried")
@pytest.mark.long
def test_contract(tpu: rd.TPUStrategy) -> None:
    for check in CHECKS:
        check(tpu)
    check_closing(lambda: rd.TPUStrategy(accelerator_version="v5litepod"))


@pytest.mark.ray
def test_one_actor_a_host_has_a_replica_for_each_chip(tpu: rd.TPUStrategy) -> None:
    def where() -> tuple[int, int, str]:
        return os.getpid(), threading.get_ident(), str(rd.get_replica_context().device)

    processes, threads, devices = zip(*tpu.local_results(tpu.run(where)), strict=True)
    assert tpu.num_replicas_in_sync == 4
    assert tpu.worker_devices == ("TPU:0", "TPU:1", "TPU:2", "TPU:3")
    assert len(set(zip(processes, threads, strict=True))) == 4
    assert [processes.count(process) for process in processes] == ([4] * 4 if IS_REAL else [2] * 4)
    assert processes[0] == processes[1]
    assert devices == (("xla:0", "xla:1", "xla:2", "xla:3") if IS_REAL else ("cpu",) * 4)


def check_sums(tpu: rd.TPUStrategy) -> None:
    """Sums over all chips are exact, and added up in the order of ranks."""

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx = rd.get_replica_context()
        mine = torch.tensor([2.0 ** (20 * ctx.replica_id_in_sync_group), 1.0], dtype=torch.float64, device=ctx.device)
        rank = torch.tensor([ctx.replica_id_in_sync_group], device=ctx.device)
        return ctx.all_reduce(rd.ReduceOp.SUM, mine), ctx.all_gather(rank, 0), ctx.all_reduce("MAX", rank)

    sums, ranks, most = tpu.run(step)
    total = float(sum(2 ** (20 * rank) for rank in range(4)))
    assert [value.tolist() for value in tpu.local_results(sums)] == [[total, 4.0]] * 4
    assert [value.tolist() for value in tpu.local_results(ranks)] == [[0, 1, 2, 3]] * 4
    assert [value.tolist() for value in tpu.local_results(most)] == [[3]] * 4


@pytest.mark.ray
def test_replicas_that_call_different_collectives_are_told_and_go_on(tpu: rd.TPUStrategy) -> None:
    def step() -> torch.Tensor:
        ctx = rd.get_replica_context()
        total: torch.Tensor = ctx.all_reduce(rd.ReduceOp.SUM, torch.ones(1 + (ctx.replica_id_in_sync_group == 2)))
        return total

    check_sums(tpu)
    with pytest.raises(rd.CollectiveMismatchError, match="rank 2 differs from the others"):
        tpu.local_results(tpu.run(step))
    check_sums(tpu)


@pytest.mark.ray
def test_four_chips_train_what_one_device_does(tpu: rd.TPUStrategy) -> None:
    for num_rows in (3, 14):  # of which a chip has none, or the last batch has not as many for each
        shape: Any = {"num_rows": num_rows, "batch_size": 6, "clip": True, "accumulate": 1, "schedule": False}
        check_program(Program("conv", "sgd", seed=num_rows, **shape), tpu)
    if not IS_REAL:  # each of its programs would be compiled for XLA: not tried
        check_exchanges(tpu, 4)


@pytest.mark.ray
def test_loops_on_chips_save_and_are_preempted_at_draws(tpu: rd.TPUStrategy, tmp_path: Path) -> None:
    options = TrainingOptions(dropout=0.0)  # the chips of a host share the generator of its CPU
    check_saves_after_draws(tpu, tmp_path / "saves", options)
    check_preemption_at_a_draw(tpu, tmp_path / "preempted", options)


@pytest.mark.ray
def test_slices_that_cannot_be_had(tpu: rd.TPUStrategy) -> None:
    late = rd.TPUStrategy("2x2x1", "v4", timeouts=rd.Timeouts(start_s=2))
    with pytest.raises(rd.DeadlineExceededError) as caught, late.scope():
        pass
    for part in (
        "A v4 slice 2x2x1",
        "within 2 s (Timeouts.start_s)",
        "slice 'slice-a' (v4-8, 2x2x1): host",
        "with 0 of",
        f"TPUs are reserved by {tpu._name} (",
    ):
        assert part in str(caught.value)
    late.close()
    with pytest.raises(rd.InvalidArgumentError, match=r"v6e matches no kinds of slices in the cluster: slice 'slice-"):
        _ = rd.TPUStrategy(accelerator_version="v6e").num_replicas_in_sync
    with pytest.raises(rd.InvalidArgumentError, match="any slice matches 2 kinds of slices in the cluster"):
        _ = rd.TPUStrategy().worker_devices
    two = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a", "b", "c"]}))
    with pytest.raises(rd.InvalidArgumentError, match="says 3 hosts, but a v5litepod slice 1x1"):
        _ = rd.TPUStrategy("1x1", cluster_resolver=two).worker_devices


# The last one that uses `tpu`.
@pytest.mark.ray
@TWO_HOSTS
def test_a_host_that_is_killed_is_an_error_soon(tpu: rd.TPUStrategy) -> None:
    check_a_host_that_is_gone(tpu, signal.SIGKILL)


@pytest.mark.ray
@TWO_HOSTS
@pytest.mark.long
def test_all_hosts_start_again_after_one_is_killed(tpu_slices: None) -> None:
    limits = rd.Timeouts(start_s=60, collective_s=10, step_s=60, close_s=5)
    options = rd.FailureOptions(recover=True)

    def train(kill_at: int) -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        with rd.TPUStrategy(accelerator_version="v4", timeouts=limits, failure_options=options) as strategy:
            with strategy.scope():
                model = nn.Linear(4, 1)
                optimizer = torch.optim.Adam(model.parameters())

            def step(rows: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(rows).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            losses = []
            data = rd.Dataset.from_tensor_slices(torch.randn(80, 4)).batch(8)
            for number, batch in enumerate(strategy.distribute_dataset(data)):
                losses.append(float(strategy.reduce("MEAN", strategy.run(step, args=(batch,)), axis=None)))
                if number == kill_at:
                    os.kill(strategy.local_results(strategy.run(os.getpid))[-1], signal.SIGKILL)
            assert len(strategy.failures()) == (kill_at >= 0)
            return model.weight.detach().cpu().clone(), losses

    weight, losses = train(kill_at=-1)
    again, losses_again = train(kill_at=4)
    torch.testing.assert_close(again, weight, rtol=1e-6, atol=1e-7)  # XLA's sums are not the same to the bit
    assert losses_again == pytest.approx(losses, rel=1e-6)


V4 = SliceShape.of("v4", "2x2x2")
TWO = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a:1", "b:1"]}), num_accelerators={"TPU": 4})
EIGHT = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a:1", "b:1"]}), num_accelerators={"TPU": 8})


def scaling_config(**said: Any) -> Any:
    return SimpleNamespace(**{"use_tpu": True, "topology": None, "accelerator_type": None, "num_workers": 2, **said})


def test_a_resolver_agrees_with_the_slice_or_is_an_error() -> None:
    assert TpuRequest.of(None, None, TWO).require(V4) is V4
    assert TpuRequest.of("2x2x2", "v4", rd.SimpleClusterResolver(rd.ClusterSpec({}))).require(V4) is V4
    config = scaling_config(topology="2X2X2", accelerator_type="TPU-V4")
    assert TpuRequest.of(None, "v4", config) == TpuRequest("2x2x2", "v4", 2)
    assert TpuRequest.of(None, None, scaling_config(num_workers=(1, 4))).num_hosts is None
    with pytest.raises(rd.InvalidArgumentError, match=r"says 2 hosts, but a v4 slice 2x2x4 \(4 hosts .*\) has 4"):
        TpuRequest.of("2x2x4", "v4", TWO).require(SliceShape.of("v4", "2x2x4"))
    with pytest.raises(rd.InvalidArgumentError, match="says 8 chips on each host, but a v4 slice"):
        TpuRequest.of(None, None, EIGHT).require(V4)
    with pytest.raises(rd.InvalidArgumentError, match="topology of the slice is '2x2x2', but .* says '2x2x4'"):
        rd.TPUStrategy("2x2x2", "v4", scaling_config(topology="2x2x4"))
    with pytest.raises(rd.InvalidArgumentError, match="version of the slice is 'v4', but .* says 'v6e'"):
        rd.TPUStrategy(None, "v4", scaling_config(accelerator_type="TPU-V6E"))
    wrong: tuple[Any, ...] = ("grpc://10.0.0.1", scaling_config(use_tpu=False), 2)
    for resolver in wrong:
        with pytest.raises(
            rd.InvalidArgumentError, match="must be an rd.ClusterResolver, or a ray.train.ScalingConfig"
        ):
            rd.TPUStrategy(cluster_resolver=resolver)
