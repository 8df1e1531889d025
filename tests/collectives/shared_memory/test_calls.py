from __future__ import annotations

import torch

from raydist.collectives.shared_memory.calls import CallTexts, is_noted, is_same_call, shown_call
from raydist.collectives.shared_memory.layout import CALL_BYTES


def test_a_call_is_made_into_text_once() -> None:
    texts = CallTexts()
    first = texts.text("all_reduce(SUM)", torch.ones(2, 3))
    assert first == b"all_reduce(SUM) of torch.float32 (2, 3)"
    assert texts.text("all_reduce(SUM)", torch.zeros(2, 3)) is first
    assert texts.text("barrier", None) == b"barrier"
    for numel in range(3000):
        texts.text("all_reduce(SUM)", torch.empty(numel))
    assert len(texts._known) <= 1024


def test_long_calls_fit_and_differ() -> None:
    shapes = [(1,) * 63 + (last,) for last in (1, 2)]
    texts = [CallTexts().text("with a long name" * 9, torch.empty(shape)) for shape in shapes]
    assert all(len(text) == CALL_BYTES - 8 for text in texts)
    assert texts[0] != texts[1]


def test_remarks_are_not_compared() -> None:
    texts, tensor = CallTexts(), torch.ones(3)
    plain = texts.text("all_reduce(MAX)", tensor)
    shown = texts.with_remarks(plain, "all_gather(axis=0) of a list", noted=False)
    noted = texts.with_remarks(plain, "", noted=True)
    both = texts.with_remarks(plain, "s" * 500, noted=True)
    for text in (shown, noted, both):
        assert is_same_call(plain.ljust(200), text.ljust(248))
        assert not is_same_call(texts.text("all_reduce(SUM)", tensor), text)
        assert len(text) <= 248
    assert shown_call(plain.ljust(200)) == shown_call(noted.ljust(248)) == "all_reduce(MAX) of torch.float32 (3,)"
    assert shown_call(shown.ljust(200)) == "all_gather(axis=0) of a list"
    assert [is_noted(text.ljust(248)) for text in (plain, shown, noted, both)] == [False, False, True, True]
