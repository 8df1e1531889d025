"""Tests with models of real packages: `make test-hub` has the packages; elsewhere these tests are not collected."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("transformers", "peft", "datasets", "timm", "torchvision", "diffusers", "torch_geometric", "lightning")

collect_ignore_glob = [] if all(find_spec(name) for name in PACKAGES) else ["*.py"]
