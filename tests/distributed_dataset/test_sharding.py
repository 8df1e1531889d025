"""Sharding over workers, against the contract: its tables, and random datasets, replicas, policies and splits (C5)."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.dataset import Dataset
from raydist.dataset.readers import TextLineDataset
from raydist.distributed_dataset import LocalDistributedDataset, distribute
from raydist.options import AutoShardPolicy, InputOptions, Options
from raydist.pipelines.formats import byte_streams
from raydist.pipelines.run.split import SplitRule
from raydist.pipelines.sources import file_format
from tests.actors.readers.fakes import fake_side

OPTIONS = InputOptions(num_input_workers=0)
FILE, DATA, OFF, AUTO = AutoShardPolicy.FILE, AutoShardPolicy.DATA, AutoShardPolicy.OFF, AutoShardPolicy.AUTO
ROWS = (6, 6, 3, 0, 1, 9, 2)  # of each file
Steps = list[list[list[int]]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files whose rows are numbered through: the first two have 0 .. 11."""
    root: Path = tmp_path_factory.mktemp("rows")
    for number, size in enumerate(ROWS):
        first = sum(ROWS[:number])
        (root / f"{number}.txt").write_text("".join(f"{first + row}\n" for row in range(size)))
    return [str(root / f"{number}.txt") for number in range(len(ROWS))]


def rows_of(number: int) -> list[int]:
    first = sum(ROWS[:number])
    return list(range(first, first + ROWS[number]))


def batches_of(files: list[str], size: int, policy: AutoShardPolicy = DATA) -> Dataset:
    lines = TextLineDataset(files).map(lambda line: int(line))
    return lines.batch(size).with_options(Options(auto_shard_policy=policy))


# What the contract says, in other words than the package does.
def sizes(rows: int, replicas: int, split: SplitRule, batch: int) -> list[int]:
    if split == "per_batch":
        most = -(-rows // replicas)
        return [min(most, max(0, rows - most * replica)) for replica in range(replicas)]
    q, r = divmod(rows, replicas)
    return [q + 1 if (replica - batch * r) % replicas < r else q for replica in range(replicas)]


def cut(rows: list[int], batch_size: int, replicas: int, split: SplitRule) -> list[list[int]]:
    """The pieces of all batches, one behind the other."""
    pieces = []
    for number, start in enumerate(range(0, len(rows), batch_size)):
        left = rows[start : start + batch_size]
        for size in sizes(len(left), replicas, split, number):
            pieces.append(left[:size])
            left = left[size:]
    return pieces


def expected(
    numbers: list[int], batch_size: int, workers: int, each: int, policy: AutoShardPolicy, split: SplitRule
) -> Steps:
    replicas = workers * each
    whole = [row for number in numbers for row in rows_of(number)]
    if policy is DATA or workers == 1:
        pieces = cut(whole, batch_size, replicas, split)
        return [pieces[start : start + replicas] for start in range(0, len(pieces), replicas)]
    shards = [whole] * workers
    if policy is not OFF:
        shards = [[row for number in numbers[worker::workers] for row in rows_of(number)] for worker in range(workers)]
    dealt = [cut(shard, batch_size, replicas, split) for shard in shards]
    steps = []
    for start in range(0, max(map(len, dealt)), each):
        step = [piece for pieces in dealt for piece in (pieces[start : start + each] + [[]] * each)[:each]]
        if any(step):
            steps.append(step)
    return steps


def run(
    dataset: Dataset, side: tuple[int, int], split: SplitRule = "per_batch", state: Any = None
) -> list[tuple[list[list[int]], Any]]:
    """Each step on so many workers of so many replicas, and the state behind it."""
    workers, each = side
    options = InputOptions(split=split, num_input_workers=0)
    with fake_side(workers * each, num_workers=workers) as inputs:
        iterator = iter(distribute(dataset, inputs, options))
        if state is not None:
            iterator.load_state_dict(json.loads(json.dumps(state)))
        return [([rows_at(batch, rank) for rank in range(workers * each)], iterator.state_dict()) for batch in iterator]


def rows_at(batch: Any, rank: int) -> list[int]:
    rows: list[int] = batch.values[rank].tolist()
    part = batch.part_on(rank, padding=True)
    padding = part.ref.leaf(part.leaf_index, part.place).tolist()
    assert len(rows) == batch.rows[rank]
    assert padding == rows if rows else len(padding) in (1, 2)
    return rows


def steps_of(dataset: Dataset, *args: Any) -> Steps:
    return [step for step, _ in run(dataset, *args)]


def test_random_cases(files: list[str]) -> None:
    """Random datasets, batch sizes, replicas, policies and splits, each resumed somewhere."""
    draw = random.Random(0)
    for _ in range(50):
        numbers = draw.sample(range(len(ROWS)), draw.randint(1, len(ROWS)))
        side = draw.randint(1, 3), draw.randint(1, 3)
        split: SplitRule = draw.choice(["per_batch", "balanced"])
        check_case(files, numbers, draw.randint(1, 9), side, draw.choice(list(AutoShardPolicy)), split, draw)


def check_case(
    files: list[str],
    numbers: list[int],
    batch_size: int,
    side: tuple[int, int],
    policy: AutoShardPolicy,
    split: SplitRule,
    draw: random.Random,
) -> None:
    workers, each = side
    dataset = batches_of([files[number] for number in numbers], batch_size, policy)
    if policy in (FILE, AUTO) and len(numbers) < workers:
        with pytest.raises(InvalidArgumentError, match=rf"each of {workers} workers.* are {len(numbers)} .*DATA"):
            run(dataset, side, split)
        return
    found = run(dataset, side, split)
    steps = [step for step, _ in found]
    assert steps == expected(numbers, batch_size, workers, each, policy, split)
    if not found:
        return
    stop = draw.randrange(len(found))
    head, state = steps[: stop + 1], found[stop][1]
    assert head + steps_of(dataset, side, split, state) == steps
    rest = steps_of(dataset, (workers, draw.randint(1, 4)), split, state)
    assert rows_in(head) + rows_in(rest) == rows_in(steps)


def rows_in(steps: Steps) -> Counter[int]:
    return Counter(row for step in steps for piece in step for row in piece)


def test_the_table_of_splits() -> None:
    table: list[tuple[int, int, int, Steps]] = [
        (6, 4, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
        (4, 4, 5, [[[0], [1], [2], [3], []]]),
        (8, 4, 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (9, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]),
    ]
    for size, batch, replicas, steps in table:
        for side in ((1, replicas), (replicas, 1)):
            assert steps_of(Dataset.range(size).batch(batch), side) == steps


def test_auto_says_once_which(files: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with fake_side(2, num_workers=2) as side, caplog.at_level("INFO", logger="raydist"):
        reading = distribute(batches_of(files[:2], 4, AUTO), side, OPTIONS)
        counting = distribute(Dataset.range(6).batch(4).with_options(Options(auto_shard_policy=AUTO)), side, OPTIONS)
        for dataset in (reading, counting):
            assert list(dataset)
            assert list(dataset)
    assert [record.getMessage() for record in caplog.records] == [
        "AutoShardPolicy.AUTO: the 2 workers read whole files (FILE).",
        "AutoShardPolicy.AUTO: one pipeline serves all 2 workers (DATA), because range(0, 6, 1) reads no files.",
    ]


def test_too_few_files_are_an_error(files: list[str]) -> None:
    numbers = Dataset.range(6).batch(4).with_options(Options(auto_shard_policy=FILE))
    with fake_side(3, num_workers=3) as side:
        with pytest.raises(NotFoundError, match=r"range\(0, 6, 1\) reads no files"):
            distribute(numbers, side, OPTIONS)
        for policy, count in ((FILE, 1), (AUTO, 2)):
            message = f"for each of 3 workers, but there are {count} in this dataset. Use AutoShardPolicy.DATA, "
            with pytest.raises(InvalidArgumentError, match=message):
                distribute(batches_of(files[:count], 4, policy), side, OPTIONS)
    assert steps_of(numbers, (1, 2)) == [[[0, 1], [2, 3]], [[4], [5]]]  # one worker: nothing to share


def test_a_state_of_shards_belongs_to_its_number_of_workers(files: list[str]) -> None:
    for policy in (FILE, OFF):
        dataset = batches_of(files, 4, policy)
        with fake_side(4, num_workers=2) as side, fake_side(3, num_workers=3) as other, fake_side(2) as single:
            iterator = iter(distribute(dataset, side, OPTIONS))
            next(iterator)
            state = json.loads(json.dumps(iterator.state_dict()))
            assert len(json.dumps(state)) < 10_000
            for fewer, number in ((other, 3), (single, 1)):
                resumed = iter(distribute(dataset, fewer, OPTIONS))
                resumed.load_state_dict(state)
                with pytest.raises(InvalidArgumentError, match=rf"it is of 2, and there are {number} now"):
                    next(resumed)
            with pytest.raises(InvalidArgumentError, match="it is of 2, and there are 1 now"):
                iter(LocalDistributedDataset(dataset)).load_state_dict(state)


def test_every_row_once_and_every_file_once(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: seven files of unequal length, one empty, on two nodes."""
    opened: Counter[str] = Counter()
    open_stream = byte_streams.open_stream

    def counting(path: str, compression: str | None) -> Any:
        opened[path] += 1
        return open_stream(path, compression)

    monkeypatch.setattr(file_format, "open_stream", counting)
    every_row = {row: 1 for number in range(len(ROWS)) for row in rows_of(number)}
    alone = [rows.tolist() for rows in LocalDistributedDataset(batches_of(files, 4))]
    for policy in (FILE, DATA):
        opened.clear()
        steps = steps_of(batches_of(files, 4, policy), (2, 1))
        assert rows_in(steps) == every_row
        assert opened == dict.fromkeys(files, 1)
        if policy is DATA:
            assert [[row for piece in step for row in piece] for step in steps] == alone


def test_unshuffled_files_stay_apart_under_a_shuffle_without_a_seed(files: list[str]) -> None:
    names = Dataset.list_files([path.replace("0.txt", "*.txt") for path in files[:1]])
    dataset = TextLineDataset(names).map(lambda line: int(line)).batch(3)
    dataset = dataset.with_options(Options(auto_shard_policy=FILE))
    with fake_side(2, num_workers=2) as side:
        distributed = distribute(dataset, side, OPTIONS)
        epochs = [[[piece.tolist() for piece in batch.values] for batch in distributed] for _ in range(3)]
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    for steps in epochs:
        assert rows_in(steps) == {row: 1 for number in range(len(ROWS)) for row in rows_of(number)}
