from __future__ import annotations

import inspect

from raydist.dataset import Dataset


def test_methods_are_documented_with_an_example() -> None:
    named = [(name, member) for name, member in inspect.getmembers(Dataset, inspect.isroutine) if name[0] != "_"]
    assert len(named) > 50
    assert [name for name, method in named if not method.__doc__ or ">>>" not in method.__doc__] == []
