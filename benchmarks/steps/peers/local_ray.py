"""A Ray of this process's own."""

from __future__ import annotations

import logging

import ray


def keep_ray(num_cpus: int) -> None:
    """Start one unless it runs. It stays for the next workload, and ends with this process."""
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
