"""The operations of pipelines on plain lists, for comparison with the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from raydist.dataset import Dataset


@final
@dataclass(frozen=True)
class Bad:
    """An element whose function raised."""


Items = list[Any]


def recorder(calls: list[int]) -> Callable[[Any], Any]:
    """A map function that changes nothing and notes what it was called with."""

    def note(x: Any) -> Any:
        calls.append(int(x))
        return x

    return note


@final
@dataclass(frozen=True)
class Step:
    """One operation, on datasets and on lists."""

    name: str
    on_dataset: Callable[[Dataset], Dataset]
    on_list: Callable[[Items], Items]


def mapped(fn: Callable[[Any], Any]) -> Step:
    def one(item: Any) -> Any:
        if isinstance(item, Bad):
            return item
        try:
            return fn(item)
        except ZeroDivisionError:
            return Bad()

    return Step("map", lambda ds: ds.map(fn), lambda items: [one(item) for item in items])


def filtered(fn: Callable[[Any], bool]) -> Step:
    return Step(
        "filter", lambda ds: ds.filter(fn), lambda items: [item for item in items if isinstance(item, Bad) or fn(item)]
    )


def batched(size: int, drop: bool) -> Step:
    """A batch and its parts: `unbatch` follows, so that elements stay numbers. A bad element spoils its batch."""

    def on_list(items: Items) -> Items:
        groups = [items[at : at + size] for at in range(0, len(items), size)]
        if drop and groups and len(groups[-1]) < size:
            groups.pop()
        return [item for group in groups for item in ([Bad()] if Bad() in group else group)]

    return Step("batch", lambda ds: ds.batch(size, drop).unbatch(), on_list)


def taken(count: int) -> Step:
    def on_list(items: Items) -> Items:
        kept: Items = []
        good = 0
        for item in items:
            if good == count:
                break
            good += not isinstance(item, Bad)
            kept.append(item)
        return kept

    return Step("take", lambda ds: ds.take(count), (lambda items: list(items)) if count < 0 else on_list)


def skipped(count: int) -> Step:
    def on_list(items: Items) -> Items:
        rest: Items = []
        left = count
        for item in items:
            if left and not isinstance(item, Bad):
                left -= 1
            else:
                rest.append(item)
        return rest

    return Step("skip", lambda ds: ds.skip(count), (lambda items: []) if count < 0 else on_list)


def repeated(count: int) -> Step:
    return Step("repeat", lambda ds: ds.repeat(count), lambda items: items * count)


def concatenated(count: int) -> Step:
    return Step("concatenate", lambda ds: ds.concatenate(Dataset.range(count)), lambda items: [*items, *range(count)])


def enumerated(start: int) -> Step:
    """Numbers, folded into the element, so that elements stay numbers. An error takes a number too."""
    return Step(
        "enumerate",
        lambda ds: ds.enumerate(start).map(lambda number, x: number * 100 + x),
        lambda items: [x if isinstance(x, Bad) else number * 100 + x for number, x in enumerate(items, start)],
    )


def taken_while(fn: Callable[[Any], bool]) -> Step:
    def on_list(items: Items) -> Items:
        return list(itertools.takewhile(lambda item: isinstance(item, Bad) or fn(item), items))

    return Step("take_while", lambda ds: ds.take_while(fn), on_list)


def sharded(num_shards: int, index: int) -> Step:
    """An error belongs to one shard, as an element does."""
    return Step("shard", lambda ds: ds.shard(num_shards, index), lambda items: items[index::num_shards])


def interleaved(cycle_length: int, block_length: int) -> Step:
    """Every number makes a dataset of up to four copies of itself."""

    def on_dataset(ds: Dataset) -> Dataset:
        return ds.interleave(lambda x: Dataset.from_tensors(x).repeat(x % 5), cycle_length, block_length)

    def on_list(items: Items) -> Items:
        waiting = [[item] if isinstance(item, Bad) else [item] * (item % 5) for item in items]
        slots: list[Items | None] = [None] * cycle_length
        result: Items = []
        turn = 0
        while waiting or any(slot is not None for slot in slots):
            slot = slots[turn]
            if slot is None and waiting:
                slot = slots[turn] = waiting.pop(0)
                if slot == [Bad()]:  # an error has no dataset: it leaves the slot empty
                    result.append(Bad())
                    slot = slots[turn] = None
            if slot is not None:
                result += slot[:block_length]
                slots[turn] = slot[block_length:] if len(slot) >= block_length else None
            turn = (turn + 1) % cycle_length
        return result

    return Step("interleave", on_dataset, on_list)


def windowed(size: int, shift: int, stride: int, drop: bool) -> Step:
    """Windows and their parts: `flat_map` follows, so that elements stay numbers. A bad element spoils its windows."""

    def on_list(items: Items) -> Items:
        windows = [items[at : at + (size - 1) * stride + 1 : stride] for at in range(0, len(items), shift)]
        kept = [window for window in windows if len(window) == size or not drop]
        return [item for window in kept for item in ([Bad()] if Bad() in window else window)]

    return Step("window", lambda ds: ds.window(size, shift, stride, drop).flat_map(lambda window: window), on_list)


def summed() -> Step:
    """Running sums."""

    def on_list(items: Items) -> Items:
        sums = itertools.accumulate(0 if isinstance(item, Bad) else item for item in items)
        return [item if isinstance(item, Bad) else total for item, total in zip(items, sums, strict=True)]

    return Step("scan", lambda ds: ds.scan(0, lambda total, x: (total + x, total + x)), on_list)


def made_unique() -> Step:
    def on_list(items: Items) -> Items:
        return [item for at, item in enumerate(items) if isinstance(item, Bad) or item not in items[:at]]

    return Step("unique", lambda ds: ds.unique(), on_list)


def without_errors() -> Step:
    return Step("ignore_errors", lambda ds: ds.ignore_errors(), lambda items: [x for x in items if x != Bad()])


def rebatched(size: int, sizes: tuple[int, ...]) -> Step:
    """Batches, batches of other sizes, and their parts. A bad element spoils a batch, and that the next one."""

    def on_list(items: Items) -> Items:
        rows = batched(size, drop=False).on_list(items)
        result: Items = []
        for one in itertools.cycle(sizes):
            if not rows:
                return result
            result += [Bad()] if Bad() in rows[:one] else rows[:one]
            rows = rows[one:]
        return result

    return Step("rebatch", lambda ds: ds.batch(size).rebatch(sizes).unbatch(), on_list)
