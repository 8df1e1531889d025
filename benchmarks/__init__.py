"""Measurements of raydist: `python -m benchmarks`."""
