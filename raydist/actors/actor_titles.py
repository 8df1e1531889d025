"""What actors are called in Ray's dashboard and in front of what they print."""

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
    """The name of an actor as a person says it: what it does, and for whom.

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
    """That of the actor in whose process this is; empty where it is in none."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return spoken_title(context.get_actor_name() or "") if context.get_actor_id() else ""
