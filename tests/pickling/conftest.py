"""The fixtures of tests/mirroring."""

from __future__ import annotations

from tests.mirroring.conftest import layer, mirror

__all__ = ["layer", "mirror"]
