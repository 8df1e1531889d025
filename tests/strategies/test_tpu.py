"""TPUStrategy on hosts without TPUs: raylets with a slice's labels, and a stand-in for torch_xla.

`make test-xla` runs the same with torch_xla itself, on XLA's CPU devices.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.strategies.tpu import TpuRequest
from raydist.testing.strategy_contract import check_program
from raydist.testing.training_program import Program
from raydist.tpu_slices.inventory import SliceShape
from tests.checkpoints.loops.training import TrainingOptions, check_preemption_at_a_draw, check_saves_after_draws
from tests.contracts.exchange_program import check_exchanges
from tests.xla_world import IS_REAL, TPU_LIMIT_S


@pytest.mark.ray
@pytest.mark.timeout(TPU_LIMIT_S)
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


@pytest.mark.ray
@pytest.mark.timeout(TPU_LIMIT_S)
def test_sums_over_all_chips_are_exact_and_in_the_order_of_ranks(tpu: rd.TPUStrategy) -> None:
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
@pytest.mark.timeout(TPU_LIMIT_S)
@pytest.mark.parametrize("num_rows", [3, 14])
def test_four_chips_train_what_one_device_does(tpu: rd.TPUStrategy, num_rows: int) -> None:
    program = Program(
        "conv", "sgd", num_rows=num_rows, batch_size=6, clip=True, accumulate=1, schedule=False, seed=num_rows
    )
    check_program(program, tpu)


@pytest.mark.ray
@pytest.mark.timeout(TPU_LIMIT_S)
@pytest.mark.skipif(IS_REAL, reason="each of its programs would be compiled for XLA: not tried")
def test_gradients_of_chips_are_those_of_one_device(tpu: rd.TPUStrategy) -> None:
    check_exchanges(tpu, 4)


@pytest.mark.ray
@pytest.mark.timeout(TPU_LIMIT_S)
def test_loops_on_chips_save_and_are_preempted_at_draws(tpu: rd.TPUStrategy, tmp_path: Path) -> None:
    options = TrainingOptions(dropout=0.0)  # the chips of a host share the generator of its CPU
    check_saves_after_draws(tpu, tmp_path / "saves", options)
    check_preemption_at_a_draw(tpu, tmp_path / "preempted", options)


@pytest.mark.ray
@pytest.mark.timeout(TPU_LIMIT_S)
def test_replicas_that_call_different_collectives_are_told_and_go_on(tpu: rd.TPUStrategy) -> None:
    def step() -> torch.Tensor:
        ctx = rd.get_replica_context()
        total: torch.Tensor = ctx.all_reduce(rd.ReduceOp.SUM, torch.ones(1 + (ctx.replica_id_in_sync_group == 2)))
        return total

    with pytest.raises(rd.CollectiveMismatchError, match="rank 2 differs from the others"):
        tpu.local_results(tpu.run(step))
    test_sums_over_all_chips_are_exact_and_in_the_order_of_ranks(tpu)


@pytest.mark.ray
@pytest.mark.timeout(TPU_LIMIT_S)
def test_a_slice_that_another_strategy_has(tpu: rd.TPUStrategy) -> None:
    late = rd.TPUStrategy("2x2x1", "v4", timeouts=rd.Timeouts(start_s=2))
    with pytest.raises(rd.DeadlineExceededError) as caught, late.scope():
        pass
    message = str(caught.value)
    assert "A v4 slice 2x2x1" in message
    assert "within 2 s (Timeouts.start_s)" in message
    assert "slice 'slice-a' (v4-8, 2x2x1): host" in message
    assert "with 0 of" in message
    assert f"TPUs are reserved by {tpu._name} (" in message
    late.close()


@pytest.mark.ray
@pytest.mark.timeout(TPU_LIMIT_S)
def test_a_slice_that_is_not_there(tpu_slices: None) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"v6e matches no kinds of slices in the cluster: slice 'slice-"):
        _ = rd.TPUStrategy(accelerator_version="v6e").num_replicas_in_sync
    with pytest.raises(rd.InvalidArgumentError, match="any slice matches 2 kinds of slices in the cluster"):
        _ = rd.TPUStrategy().worker_devices
    two = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a", "b", "c"]}))
    with pytest.raises(rd.InvalidArgumentError, match="says 3 hosts, but a v5litepod slice 1x1"):
        _ = rd.TPUStrategy("1x1", cluster_resolver=two).worker_devices


V4 = SliceShape.of("v4", "2x2x2")
TWO = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a:1", "b:1"]}), num_accelerators={"TPU": 4})


def scaling_config(**said: Any) -> Any:
    return SimpleNamespace(**{"use_tpu": True, "topology": None, "accelerator_type": None, "num_workers": 2, **said})


def test_a_resolver_that_agrees() -> None:
    assert TpuRequest.of(None, None, TWO).require(V4) is V4
    assert TpuRequest.of("2x2x2", "v4", rd.SimpleClusterResolver(rd.ClusterSpec({}))).require(V4) is V4
    config = scaling_config(topology="2X2X2", accelerator_type="TPU-V4")
    assert TpuRequest.of(None, "v4", config) == TpuRequest("2x2x2", "v4", 2)
    assert TpuRequest.of(None, None, scaling_config(num_workers=(1, 4))).num_hosts is None


def test_a_resolver_that_contradicts_the_slice() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"says 2 hosts, but a v4 slice 2x2x4 \(4 hosts .*\) has 4"):
        TpuRequest.of("2x2x4", "v4", TWO).require(SliceShape.of("v4", "2x2x4"))
    eight = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a:1", "b:1"]}), num_accelerators={"TPU": 8})
    with pytest.raises(rd.InvalidArgumentError, match="says 8 chips on each host, but a v4 slice"):
        TpuRequest.of(None, None, eight).require(V4)


def test_a_scaling_config_that_contradicts_the_arguments() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="topology of the slice is '2x2x2', but .* says '2x2x4'"):
        rd.TPUStrategy("2x2x2", "v4", scaling_config(topology="2x2x4"))
    with pytest.raises(rd.InvalidArgumentError, match="version of the slice is 'v4', but .* says 'v6e'"):
        rd.TPUStrategy(None, "v4", scaling_config(accelerator_type="TPU-V6E"))


@pytest.mark.parametrize("resolver", ["grpc://10.0.0.1", scaling_config(use_tpu=False), 2])
def test_what_is_no_resolver(resolver: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="must be an rd.ClusterResolver, or a ray.train.ScalingConfig"):
        rd.TPUStrategy(cluster_resolver=resolver)
