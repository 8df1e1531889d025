"""Measurements of raydist: `python -m benchmarks.pipelines` and `python -m benchmarks.steps`."""
