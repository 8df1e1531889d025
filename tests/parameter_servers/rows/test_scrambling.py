from __future__ import annotations

import numpy as np

from raydist.parameter_servers.rows.table_spec import scramble


def test_no_two_words_become_the_same() -> None:
    assert len(np.unique(scramble(np.arange(100_000, dtype=np.uint64)))) == 100_000


def test_each_bit_changes_about_half_of_all_bits() -> None:
    words = np.arange(1000, dtype=np.uint64)
    for bit in range(64):
        changed = scramble(words) ^ scramble(words ^ np.uint64(1 << bit))
        assert 30 < np.unpackbits(changed.view(np.uint8)).sum() / 1000 < 34


def test_what_is_given_stays_as_it_is() -> None:
    words = np.arange(3, dtype=np.uint64)
    scramble(words)
    assert words.tolist() == [0, 1, 2]
