"""Sharding over workers, against the contract: its tables, and random datasets, replicas, policies and splits (C5)."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.actors.epochs.batch_group import MadeStep, OpenGroup, StepBatch
from raydist.actors.epochs.merged_epoch import MergedSteps
from raydist.actors.epochs.served_epoch import QueueEntry
from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.dataset import Dataset
from raydist.dataset.readers import TextLineDataset
from raydist.distributed_dataset import LocalDistributedDataset, distribute
from raydist.distributed_dataset.per_replica import InputLayout
from raydist.options import AutoShardPolicy, InputOptions, Options
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.formats import byte_streams
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.joined_states import split_workers
from raydist.pipelines.run.split import SplitRule
from raydist.pipelines.run.steps import GlobalBatches, StepSource, WorkerBatches, element_views
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


# The package, without threads and actors.
def source_of(op: DatasetOp, side: tuple[int, int], split: SplitRule, state: Any, whole: bool) -> StepSource:
    workers, each = side
    iterator = DatasetIterator(op, options=Options(), seed=1, epoch=0, convert=element_views)
    source: StepSource
    if whole:
        source = GlobalBatches(iterator, workers * each, split)
    else:
        source = WorkerBatches(iterator, each, workers * each, split)
    if state is not None:
        source.load_state_dict(state)
    return source


def entries_of(source: StepSource, group_steps: int) -> Iterator[QueueEntry]:
    """What a pass offers: groups of up to so many steps, then the end."""
    number = 0
    ended = False
    while not ended:
        group = OpenGroup(1 << 30)
        while group.num_steps < group_steps and not ended:
            step = source.step
            try:
                cuts = source.next_step()
            except StopIteration:
                ended = True
            else:
                made = MadeStep(step, cuts, source.structure, source.state_dict())
                group.add(made, made.kind(), made.sizes())
        if group.num_steps:
            yield QueueEntry(number, group.states, group=group.store(lambda piece: piece, zero_copy=False))
            number += group.num_steps
    yield QueueEntry(number, (source.state_dict(),), last=True)


def run(
    layout: InputLayout, side: tuple[int, int], split: SplitRule, state: Any = None, group_steps: tuple[int, ...] = (1,)
) -> Iterator[tuple[list[list[int]], Any]]:
    """Each step, and the state behind it."""
    workers, each = side
    count = len(layout.of_workers)
    states = [None] * count if state is None else split_workers(json.loads(json.dumps(state)), count, 1)
    whole = count == 1
    sources = [source_of(ops[0], side, split, its, whole) for ops, its in zip(layout.of_workers, states, strict=True)]
    starts = [source.state_dict() for source in sources]
    merged = MergedSteps(starts, workers * each if whole else each, 0 if state is None else state["step"])
    feeds = [entries_of(source, group_steps[i % len(group_steps)]) for i, source in enumerate(sources)]
    while True:
        entry = merged.next_entry()
        if entry is None:
            for worker in merged.missing():
                merged.add(worker, [next(feeds[worker])])
        elif entry.group is None:
            return
        else:
            for place, after in enumerate(entry.states):
                step = StepBatch(entry.group, place)
                yield [rows_at(step, rank) for rank in range(workers * each)], after


def rows_at(step: StepBatch, rank: int) -> list[int]:
    piece: list[int] = step.group.refs[rank].leaf(0, step.place_on(rank, padding=False)).tolist()
    assert len(piece) == step.rows[rank]
    padding = step.group.refs[rank].leaf(0, step.place_on(rank, padding=True)).tolist()
    assert padding == piece if piece else len(padding) in (1, 2)
    return piece


@pytest.mark.parametrize("seed", range(3))
def test_random_cases(files: list[str], seed: int) -> None:
    """50 of 150 random datasets, batch sizes, replicas, policies and splits, each resumed somewhere."""
    draw = random.Random(seed)
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
    op = batches_of([files[number] for number in numbers], batch_size)._op
    if policy in (FILE, AUTO) and len(numbers) < workers:
        with pytest.raises(InvalidArgumentError, match=rf"each of {workers} workers.* are {len(numbers)} .*DATA"):
            InputLayout.of_batches(op, policy, workers)
        return
    layout = InputLayout.of_batches(op, policy, workers)
    group_steps = draw.randint(1, 4), draw.randint(1, 4)
    found = list(run(layout, side, split, group_steps=group_steps))
    assert [step for step, _ in found] == expected(numbers, batch_size, workers, each, policy, split)
    if not found:
        return
    stop = draw.randrange(len(found))
    head, state = [step for step, _ in found[: stop + 1]], found[stop][1]
    resumed = run(layout, side, split, state, group_steps=group_steps[::-1])
    assert head + [step for step, _ in resumed] == [step for step, _ in found]
    other = workers, draw.randint(1, 4)
    rest = [step for step, _ in run(layout, other, split, state, group_steps=group_steps)]
    assert rows_in(head) + rows_in(rest) == rows_in([step for step, _ in found])


def rows_in(steps: Steps) -> Counter[int]:
    return Counter(row for step in steps for piece in step for row in piece)


@settings(max_examples=30, deadline=None)
@given(batch_size=st.integers(2, 9), stops=st.lists(st.integers(0, 3), min_size=2, max_size=4), data=st.data())
def test_a_batch_is_resumed_on_ever_other_replicas(
    files: list[str], batch_size: int, stops: list[int], data: st.DataObject
) -> None:
    """Each time the rest of the batch at hand is cut anew; no row is lost, none comes twice."""
    numbers = [0, 2, 5]
    layout = InputLayout.of_batches(batches_of([files[number] for number in numbers], batch_size)._op, OFF, 2)
    state: Any = None
    seen: Steps = []
    for stop in stops:
        steps = deque(run(layout, (2, data.draw(st.integers(1, 3))), "balanced", state))
        for _ in range(min(stop, len(steps))):
            step, state = steps.popleft()
            seen.append(step)
    seen += [step for step, _ in run(layout, (2, 2), "balanced", state)]
    assert rows_in(seen) == {row: 2 for number in numbers for row in rows_of(number)}


# The same through passes with threads.
def through_passes(dataset: Dataset, replicas: int, workers: int = 1, options: InputOptions = OPTIONS) -> Steps:
    with fake_side(replicas, num_workers=workers) as side:
        return [[piece.tolist() for piece in batch.values] for batch in distribute(dataset, side, options)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("size", "batch", "replicas", "steps"),
    [
        (6, 4, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
        (4, 4, 5, [[[0], [1], [2], [3], []]]),
        (8, 4, 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (9, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]),
    ],
)
def test_the_table_of_splits(size: int, batch: int, replicas: int, steps: Steps, workers: int) -> None:
    assert through_passes(Dataset.range(size).batch(batch), replicas, workers) == steps


def test_random_cases_through_passes(files: list[str]) -> None:
    draw = random.Random(77)
    for _ in range(12):
        numbers = draw.sample(range(len(ROWS)), draw.randint(3, len(ROWS)))
        batch_size, workers, each = draw.randint(1, 9), draw.randint(1, 3), draw.randint(1, 3)
        policy, split = draw.choice(list(AutoShardPolicy)), draw.choice(["per_batch", "balanced"])
        options = InputOptions(split=split, num_input_workers=0)  # type: ignore[arg-type]  # of the two strings
        found = through_passes(
            batches_of([files[number] for number in numbers], batch_size, policy), workers * each, workers, options
        )
        assert found == expected(numbers, batch_size, workers, each, policy, split)  # type: ignore[arg-type]


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


def test_file_without_files_is_an_error() -> None:
    dataset = Dataset.range(6).batch(4).with_options(Options(auto_shard_policy=FILE))
    with fake_side(2, num_workers=2) as side, pytest.raises(NotFoundError, match=r"range\(0, 6, 1\) reads no files"):
        distribute(dataset, side, OPTIONS)
    assert through_passes(dataset, 2) == [[[0, 1], [2, 3]], [[4], [5]]]  # one worker: nothing to share


@pytest.mark.parametrize("policy", [FILE, AUTO])
@pytest.mark.parametrize("num_files", [1, 2])
def test_the_files_that_are_too_few_are_counted(files: list[str], policy: AutoShardPolicy, num_files: int) -> None:
    message = f"one file for each of 3 workers, but there are {num_files} in this dataset. Use AutoShardPolicy.DATA, "
    with fake_side(3, num_workers=3) as side, pytest.raises(InvalidArgumentError, match=message):
        distribute(batches_of(files[:num_files], 4, policy), side, OPTIONS)


@settings(max_examples=10, deadline=None)
@given(stop=st.integers(0, 5), later=st.sampled_from([(1, 1), (3, 1), (4, 1), (4, 2), (6, 3)]))
def test_a_state_of_two_nodes_gives_the_same_global_batches_anywhere(stop: int, later: tuple[int, int]) -> None:
    """C7: an epoch begun on 2 nodes x 2 replicas goes on on any number of replicas and nodes, and on one device."""
    dataset = Dataset.range(23).shuffle(9, seed=3).batch(4).with_options(Options(seed=5))
    whole = [rows.tolist() for rows in LocalDistributedDataset(dataset)]
    with fake_side(4, num_workers=2) as side, fake_side(later[0], num_workers=later[1]) as other:
        iterator = iter(distribute(dataset, side, OPTIONS))
        head = [[row for piece in next(iterator).values for row in piece.tolist()] for _ in range(stop)]
        state = json.loads(json.dumps(iterator.state_dict()))
        resumed = iter(distribute(dataset, other, OPTIONS))
        resumed.load_state_dict(state)
        rest = [[row for piece in batch.values for row in piece.tolist()] for batch in resumed]
        assert head + rest == whole
        alone = iter(LocalDistributedDataset(dataset))
        alone.load_state_dict(state)
        assert head + [rows.tolist() for rows in alone] == whole


@pytest.mark.parametrize("policy", [FILE, OFF])
def test_a_state_of_shards_belongs_to_its_number_of_workers(files: list[str], policy: AutoShardPolicy) -> None:
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
        steps = through_passes(batches_of(files, 4, policy), 2, 2)
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
