from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from typing import Any

from ray import cloudpickle as rays_copy

from raydist.actors.class_tracking import cloudpickle, share_classes

_COPIES: tuple[Any, ...] = (cloudpickle, rays_copy)

# What came by one copy before the two were made one, goes by the other afterwards.
_LATE = """
import pickle, sys
import cloudpickle
from ray import cloudpickle as rays_copy

data = bytes.fromhex(sys.argv[1])
one = pickle.loads(data)
from raydist.actors.class_tracking import share_classes
for copy in (cloudpickle, rays_copy):
    assert type(pickle.loads(copy.dumps(one))) is type(one), copy
    print(copy.dumps(one).hex())
"""


def made_here() -> Any:
    """An object whose class no other process can import."""
    cls = namedtuple("cls", ["x"])
    cls.__module__ = "__main__"
    return cls(1)


def test_a_class_that_comes_by_one_and_leaves_by_the_other_stays_the_same() -> None:
    share_classes()
    for goes in _COPIES:
        for comes in _COPIES:
            one = made_here()
            there = subprocess.run(
                [sys.executable, "-c", _LATE, goes.dumps(one).hex()],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            for line in there.stdout.split():
                assert type(comes.loads(bytes.fromhex(line))) is type(one)
