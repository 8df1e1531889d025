"""The actor of a replica, called in this process, and the check of versions on all nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from raydist.actors.replica import ReplicaHost
from raydist.actors.supervision import RemoteFailure
from raydist.actors.version_check import Software, installed_software, require_devices, require_same_software
from raydist.core.errors import FailedPreconditionError, RaydistError


@dataclass(frozen=True)
class Answer:
    results: tuple[Any, ...]
    error: BaseException | None = None


class Runner:
    """Answers with the error that it is given."""

    def __init__(self, name: str) -> None:
        self.name = name

    def steps(self, group: Any, objects: tuple[Any, ...]) -> Answer:
        return Answer((self.name,), group)


def test_errors_leave_as_values_whatever_their_class() -> None:
    host = ReplicaHost()
    host.start(0, Runner, "first")
    for error, restored in ((KeyError("mine"), KeyError), (KeyboardInterrupt("mine"), RaydistError)):
        with pytest.raises(RemoteFailure) as failure:
            host.steps(0, error)
        assert failure.value.before == Answer(("first",))
        arrived = failure.value.portable.restore()
        assert type(arrived) is restored
        assert "mine" in str(arrived)


def test_variables_are_set_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIST_TEST_VARIABLE", "before")
    ReplicaHost({"RAYDIST_TEST_VARIABLE": "3"})
    assert os.environ["RAYDIST_TEST_VARIABLE"] == "3"


# --- versions and devices of all nodes --------------------------------------------------------------------------------

NAMES = ["replica 0 on node a", "replica 1 on node b", "replica 2 on node c"]


def software(python: str = "3.11.2", torch: str = "2.9.0", raydist: str = "1.0", gpus: int = 0) -> Software:
    return Software((("Python", python), ("torch", torch), ("raydist", raydist)), gpus)


def test_other_versions_are_named_with_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for other, said in [
        (software(python="3.12.0"), "Python 3.12.0, not 3.11.2"),
        (software(torch="2.8.1"), "torch 2.8.1, not 2.9.0"),
        (software(raydist="0.9"), "raydist 0.9, not 1.0. Install the same versions"),
    ]:
        said = f"versions of the program's node: replica 1 on node b has {said}"
        with pytest.raises(FailedPreconditionError, match=said):
            require_same_software(software(), [software(), other, software(gpus=4)], NAMES)
    own = installed_software()
    monkeypatch.setattr(torch, "__version__", f"{dict(own.versions)['torch']}+cu999")
    require_same_software(own, [installed_software()], NAMES[:1])  # builds of one version may meet


def test_a_gpu_that_torch_does_not_see_is_named_with_its_node() -> None:
    require_devices(["cpu"] * 3, [software()] * 3, NAMES)
    require_devices(["cuda:0"] * 3, [software(gpus=1)] * 3, NAMES)
    with pytest.raises(FailedPreconditionError, match="torch sees none on replica 1 on node b. Install"):
        require_devices(["cuda:0"] * 3, [software(gpus=1), software(), software(gpus=1)], NAMES)
