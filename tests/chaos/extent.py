"""How long the tests of this folder go on: `make test` does some of each, `make chaos` many."""

from __future__ import annotations

import os


def how_many(some: int, many: int) -> int:
    """`many` under `make chaos`, else `some`."""
    return many if os.environ.get("RAYDIST_CHAOS") else some
