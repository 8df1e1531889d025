from __future__ import annotations

import pytest

from raydist.collectives.buckets.agreement import Agreement
from raydist.collectives.local import LocalGroup
from raydist.errors import CollectiveMismatchError
from tests.collectives.threads import run_ranks


def test_equal_numbers_pass() -> None:
    assert run_ranks(3, lambda group: Agreement(group, "x", {"step": 2**62}, advice="").wait()) == [None] * 3


def test_differing_numbers_are_shown_to_everybody() -> None:
    def body(group: LocalGroup) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            Agreement(group, "the pass", {"step": 4, "layout": group.rank}, advice="Do so.").wait()
        return str(caught.value)

    expected = "All ranks must agree on the pass, got rank 0: step 4, layout 0; rank 1: step 4, layout 1. Do so."
    assert run_ranks(2, body) == [expected, expected]
