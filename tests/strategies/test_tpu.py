"""TPUStrategy on hosts without TPUs: raylets with a slice's labels, and a stand-in for torch_xla.

`make test-xla` runs the same with torch_xla itself, on XLA's CPU devices.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import raydist as rd
from raydist.testing.strategy_contract import check_program
from raydist.testing.training_program import Program
from tests.checkpoints.loops.training import How, check_left_at_a_draw, check_saves_after_draws
from tests.contracts.exchange_program import check_exchanges
from tests.xla_world import IS_REAL, TPU_LIMIT_S

pytestmark = [pytest.mark.ray, pytest.mark.timeout(TPU_LIMIT_S)]


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


@pytest.mark.parametrize("num_rows", [3, 14])
def test_four_chips_train_what_one_device_does(tpu: rd.TPUStrategy, num_rows: int) -> None:
    program = Program(
        "conv", "sgd", num_rows=num_rows, batch_size=6, clip=True, accumulate=1, schedule=False, seed=num_rows
    )
    check_program(program, tpu)


@pytest.mark.skipif(IS_REAL, reason="each of its programs would be compiled for XLA: not tried")
def test_gradients_of_chips_are_those_of_one_device(tpu: rd.TPUStrategy) -> None:
    check_exchanges(tpu, 4)


def test_chips_save_after_draws_and_are_left_at_one(tpu: rd.TPUStrategy, tmp_path: Path) -> None:
    how = How(dropout=0.0)  # the chips of a host share the generator of its CPU
    check_saves_after_draws(tpu, tmp_path / "saves", how)
    check_left_at_a_draw(tpu, tmp_path / "left", how)


def test_replicas_that_call_different_collectives_are_told_and_go_on(tpu: rd.TPUStrategy) -> None:
    def step() -> torch.Tensor:
        ctx = rd.get_replica_context()
        total: torch.Tensor = ctx.all_reduce(rd.ReduceOp.SUM, torch.ones(1 + (ctx.replica_id_in_sync_group == 2)))
        return total

    with pytest.raises(rd.CollectiveMismatchError, match="rank 2 differs from the others"):
        tpu.local_results(tpu.run(step))
    test_sums_over_all_chips_are_exact_and_in_the_order_of_ranks(tpu)


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


def test_a_slice_that_is_not_there(tpu_slices: None) -> None:
    with pytest.raises(
        rd.InvalidArgumentError, match=r"v6e any slice|v6e is none of those in the cluster: slice 'slice-"
    ):
        _ = rd.TPUStrategy(accelerator_version="v6e").num_replicas_in_sync
    with pytest.raises(rd.InvalidArgumentError, match="any slice is 2 kinds of those in the cluster"):
        _ = rd.TPUStrategy().worker_devices
    two = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a", "b", "c"]}))
    with pytest.raises(rd.InvalidArgumentError, match="says 3 hosts, but a v5litepod slice 1x1"):
        _ = rd.TPUStrategy("1x1", cluster_resolver=two).worker_devices
