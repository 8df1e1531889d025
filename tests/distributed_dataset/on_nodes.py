"""What a program sees of distributed input on two nodes with two replicas each. Run in the driver process of a cluster:
see `tests/strategies/test_multi_worker.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import raydist as rd
from raydist.actors.epochs.input_pipeline_actors import InputPipelineActors
from raydist.distributed_dataset import InputSide, LocalDistributedDataset, ReplicaCount, distribute
from tests.several_nodes import LIMITS, shared_strategy

ROWS = (6, 6, 3, 0, 1, 9, 2)
OPTIONS = rd.InputOptions(num_input_workers=0)


def strategy_on_nodes() -> rd.MultiWorkerMirroredStrategy:
    return shared_strategy(2, 2)


def write_files(folder: str) -> list[str]:
    """Files whose rows are numbered through."""
    for number, size in enumerate(ROWS):
        first = sum(ROWS[:number])
        (Path(folder) / f"{number}.txt").write_text("".join(f"{first + row}\n" for row in range(size)))
    return [f"{folder}/{number}.txt" for number in range(len(ROWS))]


def node_id_here() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def reading(paths: list[str], policy: rd.AutoShardPolicy) -> rd.Dataset:
    """Global batches of numbers, each with the node that read it."""

    def where(line: bytes) -> tuple[int, str]:
        return int(line), node_id_here()

    lines = rd.TextLineDataset(paths).map(where, output_spec=(rd.TensorSpec((), int), rd.TensorSpec((), str)))
    return lines.batch(4).with_options(rd.Options(auto_shard_policy=policy))


def pieces(dataset: Any) -> list[list[list[int]]]:
    return [[part.tolist() for part in numbers.values] for numbers, _ in dataset]


def files_are_read_once_where_their_rows_go(folder: str) -> None:
    """C8, FILE: every row once an epoch, made on the node of the replicas that get it."""
    strategy = strategy_on_nodes()
    dataset = strategy.distribute_dataset(reading(write_files(folder), rd.AutoShardPolicy.FILE), OPTIONS)
    for _ in range(2):
        batches = list(dataset)
        seen = Counter(row for step in pieces(batches) for piece in step for row in piece)
        assert seen == dict.fromkeys(range(sum(ROWS)), 1)
        hosts = strategy._launch().hosts
        assert len(set(hosts)) == 2
        for _, nodes in batches:
            for host, names in zip(hosts, nodes.values, strict=True):
                assert set(names.tolist()) <= {host}


def data_gives_the_batches_of_one_device(folder: str) -> None:
    """C8, DATA: the same batches as on one device, each file opened once in all."""
    marks = Path(folder) / "opened"
    marks.mkdir()

    def open_noted(name: str) -> rd.Dataset:
        (marks / f"{os.path.basename(name)}-{os.getpid()}-{os.urandom(4).hex()}").touch()
        return rd.TextLineDataset(name)

    lines = rd.Dataset.from_tensor_slices(write_files(folder)).flat_map(open_noted).map(lambda line: int(line))
    batches = lines.batch(4)
    alone = [rows.tolist() for rows in LocalDistributedDataset(batches)]
    for mark in marks.iterdir():
        mark.unlink()
    dataset = strategy_on_nodes().distribute_dataset(batches, OPTIONS)
    assert [[row for part in batch.values for row in part.tolist()] for batch in dataset] == alone
    assert sorted(mark.name[:5] for mark in marks.iterdir()) == [f"{number}.txt" for number in range(len(ROWS))]


def gradients_are_means_over_the_rows_of_all_workers(folder: str) -> None:
    """Also where one worker's data has ended, in a step from outside and in a loop inside."""
    strategy = strategy_on_nodes()
    lines = rd.TextLineDataset(write_files(folder)).map(lambda line: int(line)).batch(4)
    lines = lines.with_options(rd.Options(auto_shard_policy=rd.AutoShardPolicy.FILE))
    dataset = strategy.distribute_dataset(lines, OPTIONS)
    with strategy.scope():
        weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def gradient(rows: torch.Tensor) -> tuple[float, int]:
        weight.grad = None
        (weight * rows.double()).mean().backward()
        assert weight.grad is not None
        return round(weight.grad.item(), 9), rd.get_replica_context().global_num_rows

    means = []
    for batch in dataset:
        rows = [row for part in batch.values for row in part.tolist()]
        means.append(round(sum(rows) / len(rows), 9))
        found, counts = strategy.run(gradient, args=(batch,))
        assert set(strategy.local_results(found)) == {means[-1]}
        assert set(strategy.local_results(counts)) == {len(rows)}
    inside = strategy.run(lambda batches: [gradient(rows)[0] for rows in batches], args=(iter(dataset),))
    assert strategy.local_results(inside) == (means,) * 4


def a_state_goes_on_anywhere() -> None:
    """C7: the epoch begun on 2 nodes x 2 replicas, on 3 replicas of one node and on one device."""
    dataset = rd.Dataset.range(23).shuffle(9, seed=3).batch(4).with_options(rd.Options(seed=5))
    whole = [rows.tolist() for rows in LocalDistributedDataset(dataset)]

    def flat(batches: Any) -> list[list[int]]:
        return [[row for part in batch.values for row in part.tolist()] for batch in batches]

    iterator = iter(strategy_on_nodes().distribute_dataset(dataset, OPTIONS))
    head = flat(next(iterator) for _ in range(2))
    state = json.loads(json.dumps(iterator.state_dict()))
    host = InputPipelineActors("later", num_replicas=3, timeouts=LIMITS)
    try:
        resumed = iter(distribute(dataset, InputSide(host, ReplicaCount(3), LIMITS, drain=lambda: None), OPTIONS))
        resumed.load_state_dict(state)
        assert head + flat(resumed) == whole
    finally:
        host.close()
    alone = iter(LocalDistributedDataset(dataset))
    alone.load_state_dict(state)
    assert head + [rows.tolist() for rows in alone] == whole


def a_missing_file_is_named_with_its_node(folder: str) -> None:
    """Where the node was to read it: the second one by FILE, that of the only pipeline by DATA."""
    strategy = strategy_on_nodes()
    lines = rd.TextLineDataset([write_files(folder)[0], f"{folder}/not here.txt"]).batch(2)
    for policy in (rd.AutoShardPolicy.FILE, rd.AutoShardPolicy.DATA):
        dataset = strategy.distribute_dataset(lines.with_options(rd.Options(auto_shard_policy=policy)), OPTIONS)
        iterator, errors, rows = iter(dataset), list[rd.NotFoundError](), Counter[int]()
        while len(errors) + sum(rows.values()) < 7:
            try:
                rows.update(int(row) for part in next(iterator).values for row in part)
            except rd.NotFoundError as error:
                errors.append(error)
        assert next(iterator, None) is None
        (missing,) = errors
        assert "not here.txt" in str(missing)
        # One pipeline for all is where the first replica was known to be when it was made, placed or not.
        one = [strategy._pipelines()._main.node_id or ""]
        nodes = strategy._launch().hosts if policy is rd.AutoShardPolicy.FILE else one
        assert f"({nodes[-1][:8]})" in "".join(missing.__notes__), missing.__notes__


def input_workers_are_on_the_nodes_of_the_replicas() -> None:
    """And on no other: the head, which the driver is on, makes no element."""
    strategy = strategy_on_nodes()

    def where(number: int) -> tuple[int, str]:
        time.sleep(0.02)
        return number, node_id_here()

    made = rd.Dataset.range(32).map(where, output_spec=(rd.TensorSpec((), int), rd.TensorSpec((), str))).batch(4)
    dataset = strategy.distribute_dataset(made, rd.InputOptions(num_input_workers=2))
    batches = list(dataset)
    assert [row for step in pieces(batches) for piece in step for row in piece] == list(range(32))
    assert {name for _, nodes in batches for names in nodes.values for name in names} == set(strategy._launch().hosts)


def large_rows_stay_on_their_node(folder: str) -> None:
    """FILE: the pipelines move row ids of what the input workers of their node have stored."""
    strategy = strategy_on_nodes()
    lines = rd.TextLineDataset(write_files(folder)).map(lambda line: torch.full((20_000,), int(line)).numpy())
    lines = lines.batch(4).with_options(rd.Options(auto_shard_policy=rd.AutoShardPolicy.FILE))
    dataset = strategy.distribute_dataset(lines, rd.InputOptions(num_input_workers=1))
    seen: Counter[int] = Counter()
    for batch in dataset:
        shares = [batch.part_on(rank).ref for rank in range(4)]
        assert sum(share.bytes_here for share in shares) < sum(share.num_bytes for share in shares) / 100
        parts = strategy.local_results(strategy.run(lambda rows: rows[:, 19_999], args=(batch,)))  # with rows only
        found = [part.tolist() for part in parts]
        assert found == [part[:, 0].tolist() for part in batch.values if len(part)]
        seen.update(row for part in found for row in part)
    assert seen == dict.fromkeys(range(sum(ROWS)), 1)


def large_rows_are_put_together_where_they_are_stored() -> None:
    """DATA: no value passes through the pipeline of all nodes, and replicas do not map blocks of other rows."""
    strategy = strategy_on_nodes()
    dataset = rd.Dataset.range(80).map(lambda x: torch.full((20_000,), int(x)).numpy()).shuffle(60, seed=1).batch(8)
    expected = [rows[:, 0].tolist() for rows in LocalDistributedDataset(dataset)]
    found = []
    for batch in strategy.distribute_dataset(dataset, rd.InputOptions(num_input_workers=4)):
        for rank in range(4):
            piece = batch.part_on(rank).ref
            blocks = {stored.result.ref: stored for c in piece._columns for stored in c.stored.values()}
            held = sum(stored.row_bytes * stored.shape[0] for stored in blocks.values())
            assert piece.bytes_here < piece.num_bytes / 100
            assert held <= 2 * piece.num_bytes
        parts = strategy.local_results(strategy.run(lambda rows: rows[:, 19_999], args=(batch,)))
        found.append([row for part in parts for row in part.tolist()])
    assert found == expected


def from_a_pool(check: Callable[..., None], *args: Any) -> None:
    """The same with a pool of input workers for all nodes."""
    global OPTIONS
    before, OPTIONS = OPTIONS, rd.InputOptions(num_input_workers=2)
    try:
        check(*args)
    finally:
        OPTIONS = before


IN_A_FOLDER = (
    files_are_read_once_where_their_rows_go,
    data_gives_the_batches_of_one_device,
    gradients_are_means_over_the_rows_of_all_workers,
    a_missing_file_is_named_with_its_node,
    large_rows_stay_on_their_node,
)
ELSEWHERE = (
    a_state_goes_on_anywhere,
    input_workers_are_on_the_nodes_of_the_replicas,
    large_rows_are_put_together_where_they_are_stored,
)
FROM_A_POOL: tuple[Callable[..., None], ...] = (
    files_are_read_once_where_their_rows_go,
    data_gives_the_batches_of_one_device,
    a_state_goes_on_anywhere,
)
