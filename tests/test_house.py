"""Names of modules and threads that can be told apart."""

from __future__ import annotations

from tests.conftest import LIBRARY_THREADS
from tests.import_graph import modules


def test_a_module_is_not_named_like_a_folder_beside_it() -> None:
    assert [path for path in modules().values() if any(path.with_suffix("").rglob("*.py"))] == []


def test_threads_of_ours_are_told_from_those_of_libraries() -> None:
    assert not any(f"{ours}-anything".startswith(LIBRARY_THREADS) for ours in ("raydist", "MainThread", "Thread-1"))
