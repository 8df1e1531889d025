from __future__ import annotations

import platform

import pytest
import torch

import raydist as rd
from raydist.actors.version_check import Software, installed_software, require_devices, require_same_software
from raydist.core.errors import FailedPreconditionError

NAMES = ["replica 0 on node a", "replica 1 on node b", "replica 2 on node c"]


def software(python: str = "3.11.2", torch: str = "2.9.0", raydist: str = "1.0", gpus: int = 0) -> Software:
    return Software((("Python", python), ("torch", torch), ("raydist", raydist)), gpus)


def test_what_is_installed_here() -> None:
    found = dict(installed_software().versions)
    assert found == {
        "Python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "raydist": rd.__version__,
    }


def test_builds_of_one_version_may_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    own = installed_software()
    monkeypatch.setattr(torch, "__version__", f"{dict(own.versions)['torch']}+cu999")
    require_same_software(own, [installed_software()], NAMES[:1])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (software(python="3.12.0"), "replica 1 on node b has Python 3.12.0, not 3.11.2"),
        (software(torch="2.8.1"), "replica 1 on node b has torch 2.8.1, not 2.9.0"),
        (software(raydist="0.9"), "replica 1 on node b has raydist 0.9, not 1.0. Install the same versions"),
    ],
)
def test_other_versions_are_named_with_their_node(other: Software, said: str) -> None:
    with pytest.raises(FailedPreconditionError, match=f"versions of the program's node: {said}"):
        require_same_software(software(), [software(), other, software(gpus=4)], NAMES)


def test_all_differences_are_named() -> None:
    with pytest.raises(FailedPreconditionError, match=r"node a has torch 2\.8, .*; .* node c has raydist 2\.0, not"):
        require_same_software(software(), [software(torch="2.8"), software(), software(raydist="2.0")], NAMES)


def test_a_gpu_that_torch_does_not_see_is_named_with_its_node() -> None:
    require_devices(["cpu"] * 3, [software()] * 3, NAMES)
    require_devices(["cuda:0"] * 3, [software(gpus=1)] * 3, NAMES)
    with pytest.raises(FailedPreconditionError, match="torch sees none on replica 1 on node b. Install"):
        require_devices(["cuda:0"] * 3, [software(gpus=1), software(), software(gpus=1)], NAMES)
