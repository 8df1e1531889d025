from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from raydist.pipelines.engine.machine import free_in_containers, free_memory, num_cores


def test_cores_are_those_of_this_process() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def test_memory_is_what_is_free() -> None:
    free = free_memory()
    assert free is None or 1 << 30 <= free <= max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def test_other_systems_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert free_memory() is None


@pytest.mark.parametrize(
    ("limit_name", "limit", "used_name", "free"),
    [
        ("memory.max", "1000", "memory.current", [550]),
        ("memory.max", "max", "memory.current", []),
        ("memory.limit_in_bytes", "1000", "memory.usage_in_bytes", [550]),
    ],
)
def test_cached_files_of_a_container_are_free(
    tmp_path: Path, limit_name: str, limit: str, used_name: str, free: list[int]
) -> None:
    (tmp_path / limit_name).write_text(f"{limit}\n")
    (tmp_path / used_name).write_text("800\n")
    (tmp_path / "memory.stat").write_text("anon 400\nfile 400\nshmem 50\ninactive_file 300\nactive_file 50\n")
    assert free_in_containers([tmp_path / "none", tmp_path]) == free
