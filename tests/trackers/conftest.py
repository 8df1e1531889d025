"""Tests with the real wandb and mlflow: `make test-trackers` has them; elsewhere these tests are not collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("wandb") and find_spec("mlflow") else ["test_*.py"]
