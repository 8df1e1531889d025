"""Shared by the tests of estimators."""

from __future__ import annotations

from tests.training.conftest import strategy as strategy
