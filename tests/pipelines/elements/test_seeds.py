from __future__ import annotations

import numpy as np
import pytest

from raydist.pipelines.elements.seeds import RandomKey, draw_seed, trim_epoch

KEY = RandomKey(3, "map-1", (2,))


def test_a_stream_is_the_same_in_any_pieces() -> None:
    whole = KEY.words(0, 50)
    assert [KEY.words(start, 50 - start).tolist() == whole[start:].tolist() for start in range(0, 50, 7)] == [True] * 8


def test_streams_differ_in_seed_operation_and_epoch() -> None:
    others = [RandomKey(4, "map-1", (2,)), RandomKey(3, "map-2", (2,)), RandomKey(3, "map-1", (3,))]
    assert len({tuple(key.words(0, 4).tolist()) for key in (KEY, *others)}) == 4


def test_generators_are_numbered() -> None:
    numbered = KEY.generators(5)
    assert next(numbered).random() == KEY.generator(5).random()
    assert next(numbered).random() == KEY.generator(6).random()


@pytest.mark.parametrize("index", [0, 1, 2**33, 2**63 - 1])
def test_an_elements_generator_is_philox_at_its_counter(index: int) -> None:
    bits = KEY.generator(index).bit_generator.state["state"]
    assert bits["counter"].tolist() == [0, 0, index, 0]
    fresh = np.random.Generator(np.random.Philox(key=bits["key"], counter=index << 128))
    assert KEY.generator(index).normal(size=9).tolist() == fresh.normal(size=9).tolist()


def test_what_an_element_drew_leaves_nothing_for_the_next() -> None:
    numbered = KEY.generators(0)
    for index in range(4):
        generator = next(numbered)
        assert generator.random() == KEY.generator(index).random()
        generator.integers(0, 9, dtype=np.int32)  # keeps half a word
        del generator


def test_a_kept_generator_stays_that_of_its_element() -> None:
    numbered = KEY.generators(0)
    kept = [next(numbered) for _ in range(3)]
    draw = next(numbered).random
    next(numbered)
    assert [generator.random() for generator in kept] == [KEY.generator(index).random() for index in range(3)]
    assert draw() == KEY.generator(3).random()


def test_integers_are_in_range_and_even() -> None:
    drawn = KEY.integers(0, 6000, 6)
    counts = np.bincount(drawn, minlength=6)
    assert len(counts) == 6
    assert counts.min() > 850


def test_the_first_pass_of_a_repeat_is_the_epoch_itself() -> None:
    assert trim_epoch((0, 0, 2)) == (2,)
    assert RandomKey(1, "a", (0, 1)).words(0, 3).tolist() == RandomKey(1, "a", (1,)).words(0, 3).tolist()


def test_drawn_seeds_differ_and_fit_into_json() -> None:
    seeds = {draw_seed() for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)
