"""Every module has its test file: raydist/pipelines/ops/map.py has tests/pipelines/ops/test_map.py."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "raydist"

# Modules that have nothing of their own to test, each with the tests that run through it.
TESTED_ELSEWHERE: dict[str, str] = {
    "actors/workers/pool_task.py": "tests/actors/workers/test_pool.py",
    "actors/workers/handle.py": "tests/actors/workers/test_pool.py",
    "collectives/backend.py": "tests/collectives/test_contract.py",
    "collectives/base.py": "tests/contracts/communicator.py",
    "collectives/process_group_backend.py": "tests/collectives/test_contract.py",
    "pipelines/engine/optional_prefetch.py": "tests/pipelines/autotune/test_tuned_prefetch.py",
    "pipelines/engine/random_access.py": "tests/pipelines/sources/test_indexed.py",
    "strategies/synchronous.py": "tests/strategies/test_mirrored.py",
}

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def expected_tests_of(module: str) -> Path:
    path = Path(module)
    return ROOT / "tests" / path.parent / f"test_{path.name}"


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_test_file(module: str) -> None:
    expected = ROOT / TESTED_ELSEWHERE[module] if module in TESTED_ELSEWHERE else expected_tests_of(module)
    assert expected.is_file(), f"raydist/{module} needs {expected.relative_to(ROOT)}"


def test_exceptions_are_needed() -> None:
    assert set(TESTED_ELSEWHERE) <= set(MODULES)
    assert [module for module in TESTED_ELSEWHERE if expected_tests_of(module).is_file()] == []
