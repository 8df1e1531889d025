"""Serving of exported models by Ray Serve, with the REST interface of TensorFlow Serving. Begin at `app.py`."""

from __future__ import annotations

from raydist.serve.app import app as app

__all__ = ["app"]
