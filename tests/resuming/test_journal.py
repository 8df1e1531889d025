"""Journals and digests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import FailedPreconditionError, SpecError
from tests.resuming.journal import JOURNAL_VARIABLE, Account, Journal, account_of, differences, state_digest


def test_what_a_life_did_behind_the_next_ones_begin_does_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.lines() == []
    journal.begins(0)
    for step in (1, 2, 3):
        journal.saw(step, [step])
        if step < 3:
            journal.acknowledged(step)
    journal.begins(2)
    journal.saw(3, [9])
    journal.ends("d")
    account = account_of(journal.lines())
    assert account == Account({1: [1], 2: [2], 3: [9]}, [0, 2], "d", [])
    assert 0 < account.worked_s < 10
    assert journal.has_begun(os.getpid())
    assert not journal.has_begun(os.getpid() + 1)


def test_what_was_safe_must_not_be_lost() -> None:
    lines = ['{"begins": 0}', '{"acknowledged": 4}', '{"acknowledged": 2}', '{"begins": 3}']
    assert account_of(lines).lost == ["life 1 began at step 3, but 4 was safe"]


def test_differences_are_named() -> None:
    expected = Account({1: [0], 2: [1, 2]}, [0], "a")
    assert differences(expected, Account({2: [1, 2], 1: [0]}, [0, 1, 2], "a")) == []
    assert differences(expected, Account({1: [0]}, [0], "")) == [
        "step 2 must have the rows [1, 2], got None",
        "the end must have the digest a, got none",
    ]
    assert differences(expected, Account({1: [0], 2: [2, 1]}, [0], "a")) == [
        "step 2 must have the rows [1, 2], got [2, 1]"
    ]


def test_a_program_alone_has_no_journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(JOURNAL_VARIABLE, raising=False)
    with pytest.raises(FailedPreconditionError, match="must be started by a trial"):
        Journal.of_environment()
    monkeypatch.setenv(JOURNAL_VARIABLE, str(tmp_path))
    assert Journal.of_environment().folder == tmp_path / "kept"


STATE: dict[str, Any] = {"a": torch.arange(6).view(2, 3), "b": [1, 2.0, None, "x", b"y", (True,)], "c": np.ones(2)}


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.arange(6).view(3, 2)},
        {"a": torch.arange(6, dtype=torch.int32).view(2, 3)},
        {"a": torch.tensor([[0, 1, 2], [3, 4, 6]])},
        {"b": [1, 2.0, None, "x", b"y", [True]]},
        {"b": [1, 2.0, None, "x", b"y", (1,)]},
        {"c": np.ones((2, 1))},
        {"c": torch.ones(2, dtype=torch.float64)},
        {"d": None},
    ],
)
def test_any_difference_is_another_digest(other: dict[str, Any]) -> None:
    assert state_digest(STATE) == state_digest(dict(reversed(STATE.items())))
    assert state_digest({**STATE, **other}) != state_digest(STATE)


def test_bits_count_not_values() -> None:
    assert state_digest(torch.tensor(0.0)) != state_digest(torch.tensor(-0.0))
    assert state_digest(torch.tensor(float("nan"))) == state_digest(torch.tensor(float("nan")))
    assert state_digest(torch.empty(0)) != state_digest(torch.empty(0, 1))


def test_other_things_have_none() -> None:
    with pytest.raises(SpecError, match="got function"):
        state_digest({"a": [test_bits_count_not_values]})
