"""An input pipeline is lost at random moments: the batches are the same, those in use are made again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import raydist as rd
from raydist.actors.readers.driver_epoch import make_again
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, distribute
from raydist.options import InputOptions
from tests.actors.readers.fakes import fake_side


def batches_of(side: InputSide, dataset: Dataset) -> Any:
    return iter(distribute(dataset, side, InputOptions(num_input_workers=0)))


def rows(leaf: Any) -> list[int]:
    return [row for part in leaf._fetch() for row in part.tolist()]


DATA = Dataset.range(200).shuffle(50, seed=3).filter(lambda x: x % 7 > 0).batch(6)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_are_the_same_and_those_in_use_are_made_again(num_workers: int) -> None:
    draw = random.Random(0)
    data = DATA
    if num_workers == 2:
        options = rd.Options(auto_shard_policy=rd.AutoShardPolicy.OFF)
        data = DATA.with_options(options)
    with fake_side(4, num_workers=num_workers) as side:
        expected = [rows(leaf) for leaf in batches_of(side, data)]
    for _ in range(5):
        with fake_side(4, num_workers=num_workers) as side:
            host: Any = side.opener
            in_use: dict[int, Any] = {}
            for number, leaf in enumerate(batches_of(replace(side, restarts=3), data)):
                in_use[number] = leaf
                if draw.random() < 0.1:
                    host.lose_pipeline()
                    make_again([each.drawn for each in in_use.values() if each.drawn.link.is_lost()])
                if draw.random() < 0.1:
                    host.lose_pipeline()  # the driver reads what is lost, or the iterator goes on
                for done in draw.sample(sorted(in_use), k=draw.randrange(len(in_use) + 1)):
                    assert rows(in_use.pop(done)) == expected[done]
            assert number + 1 == len(expected)


def test_without_restarts_or_with_a_pipeline_that_always_dies_the_loss_is_an_error() -> None:
    for restarts in (0, 2):
        with fake_side(2) as side:
            host: Any = side.opener
            iterator = batches_of(replace(side, restarts=restarts), DATA)
            first = next(iterator)
            host.lose_pipeline()
            open_epoch = host.open

            def dies(job: Any, open_epoch: Any = open_epoch, host: Any = host) -> Any:
                link = open_epoch(job)
                host.lose_pipeline()
                return link

            host.open = dies
            with pytest.raises(rd.UnavailableError, match="is gone"):
                next(iterator)
            with pytest.raises(rd.UnavailableError):
                rows(first)


def test_another_batch_in_the_place_of_the_lost_one_is_an_error() -> None:
    with fake_side(1) as side:
        leaf = next(batches_of(side, DATA))
        other = next(batches_of(side, Dataset.range(20).batch(3))).drawn
        with pytest.raises(rd.UnavailableError, match="must make the same batch"):
            leaf.drawn.move_to(other.batch, other.link)
