"""Groups of tests for several processes: those of a file, and those that share a cluster of the session."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # xdist is not annotated

__all__ = ["ClusterScheduling"]

ROOT = Path(__file__).parent.parent

# What they compile has every replica load torch's compiler, for seconds: the same replicas for both.
COMPILING = ("tests/strategies/test_gradient_kinds.py", "tests/strategies/test_same_as_one_device.py")


class ClusterScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not annotated
    """Files go to one process each; those that use a cluster of the session to the one that has it."""

    def _split_scope(self, nodeid: str) -> Any:
        return scope_of(nodeid.partition("::")[0])


@functools.cache
def scope_of(file: str) -> str:
    """Return the group of a file's tests: the fixture of the cluster that they share, else the file."""
    if file in COMPILING:
        return "compiling"
    path = ROOT / file
    text = path.read_text() if path.suffix == ".py" and path.is_file() else ""
    if "mark.ray" not in text:
        return file
    for fixture in ("nodes: Nodes", "scripts: Scripts"):
        if fixture in text:
            return fixture.partition(":")[0]
    alone = "ray_cluster" not in text and ("ray_head" in text or "subprocess" in text)
    return file if alone else "ray_cluster"
