from __future__ import annotations

import numpy as np

from raydist.pipelines.seeds import RandomKey, draw_seed, trim_epoch

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
