"""Readable titles of actors for Ray's dashboard and for the prefix of their output."""

from __future__ import annotations

import re

import ray

__all__ = ["spoken_title", "title_of_this_actor"]

_TITLES = (
    (re.compile(r"(.+)-input-[0-9a-f]{8}"), r"input pipeline of \1"),
    (re.compile(r"(.+)-input-[0-9a-f]{8}-worker-(\d+)"), r"input worker \2 of \1"),
    (re.compile(r"raydist-input-worker-(\d+)"), r"input worker \1"),
    (re.compile(r"(.+)-server-(\d+)"), r"parameter server \2 of \1"),
    (re.compile(r"(.+)-(replica|worker)-(\d+)"), r"\2 \3 of \1"),
)


def spoken_title(name: str) -> str:
    """Return a readable title for the actor `name`: its role and its strategy.

    >>> spoken_title("mirrored-1a2b3c4d-replica-0")
    'replica 0 of mirrored-1a2b3c4d'
    >>> spoken_title("mirrored-1a2b3c4d-input-55e6f708")
    'input pipeline of mirrored-1a2b3c4d'
    >>> spoken_title("mirrored-1a2b3c4d-input-55e6f708-worker-3")
    'input worker 3 of mirrored-1a2b3c4d'
    """
    found = ((pattern.fullmatch(name), title) for pattern, title in _TITLES)
    return next((match.expand(title) for match, title in found if match), name)


def title_of_this_actor() -> str:
    """Return the title of the actor that runs in this process, or "" outside an actor."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return spoken_title(context.get_actor_name() or "") if context.get_actor_id() else ""
