"""Groups of tests for several processes: those of a file, and those that share a cluster of the session."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # xdist is not annotated

__all__ = ["ClusterScheduling"]

ROOT = Path(__file__).parent.parent

# What tests with the session's cluster name: it, a function that gives its strategies, or the strategies of a module.
ON_CLUSTER = re.compile(r'ray_cluster: None|"ray_cluster"|: Callable\[\[int\], rd\.\w+Strategy\]|FEW_MAKERS')
# Those whose strategy is a fixture of a conftest.py.
OF_CONFTEST = ("tests/training/test_losses.py", "tests/training/test_model_losses.py")


class ClusterScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not annotated
    """Files go to one process each; those that use a cluster of the session to the one that has it."""

    def _split_scope(self, nodeid: str) -> Any:
        return scope_of(nodeid.partition("::")[0])


@functools.cache
def scope_of(file: str) -> str:
    """Return the group of a file's tests: the fixture of the cluster that they share, else the file."""
    path = ROOT / file
    text = path.read_text() if path.suffix == ".py" and path.is_file() else ""
    if file in OF_CONFTEST or ON_CLUSTER.search(text):
        return "ray_cluster"
    if "mark.ray" not in text:
        return file
    for fixture in ("nodes: Nodes", "scripts: Scripts"):
        if fixture in text:
            return fixture.partition(":")[0]
    return file if "ray_head" in text or "subprocess" in text else "ray_cluster"
