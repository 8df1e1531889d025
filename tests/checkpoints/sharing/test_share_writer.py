"""A replica's half of a save, without replicas: writers of several ranks over equal objects."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raydist.checkpoints.new_files import new_files
from raydist.checkpoints.sharing.share_writer import ShareWriter, begin_share
from raydist.checkpoints.sharing.shares import Share, ShareRequest
from raydist.checkpoints.state import State
from raydist.pipelines.stored.directory_files import directory_files

CPU = torch.device("cpu")


def report(writer: ShareWriter, token: str) -> Share | Exception:
    end = time.monotonic() + 10
    while (found := writer.report(token)) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert found is not None
    return found


def request(path: Path, token: str = "a", **stems: str) -> ShareRequest:
    return ShareRequest(token, new_files(directory_files(str(path))), stems)


def test_the_copy_is_taken_at_once_and_each_writes_its_share(tmp_path: Path) -> None:
    torch.manual_seed(1)
    modules = {name: torch.nn.Linear(8, 8) for name in ("a", "b")}
    asked = request(tmp_path / "c", a="a", b="b")
    before = {name: module.weight.detach().clone() for name, module in modules.items()}
    writers = [ShareWriter(rank, 2, CPU) for rank in range(2)]
    for writer in writers:
        begin_share(writer, asked, modules, modules)
    with torch.no_grad():
        for module in modules.values():
            module.weight.zero_()
    shares = [report(writer, "a") for writer in writers]
    assert all(isinstance(share, Share) for share in shares)
    assert [sorted(share.files) for share in shares if isinstance(share, Share)] == [[("a", 0)], [("b", 0)]]
    assert [sorted(share.objects) for share in shares if isinstance(share, Share)] == [["a", "b"], []]
    for name, weight in before.items():
        assert torch.equal(load_file(tmp_path / "c" / f"{name}.safetensors")["weight"], weight)
    for writer in writers:
        writer.close(10)


class Bad:
    """Has a state that cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"fn": print}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never called."""


def test_what_goes_wrong_is_told_and_raises_nothing_in_the_step(tmp_path: Path) -> None:
    writer = ShareWriter(0, 1, CPU)
    writer.begin(request(tmp_path / "c", bad="bad"), {"bad": Bad()}, {})
    with pytest.raises(ValueError, match=r"bad\.fn|'bad'"):
        raise report(writer, "a")  # type: ignore[misc]  # an exception, as the next line would find out
    lost = request(tmp_path / "d", token="b", model="model")
    (tmp_path / "d").rmdir()
    writer.begin(lost, {"model": torch.nn.Linear(1, 1)}, {})
    assert isinstance(report(writer, "b"), Exception)
    writer.close(10)


def test_only_the_last_saves_are_remembered(tmp_path: Path) -> None:
    writer = ShareWriter(0, 1, CPU)
    for number in range(6):
        writer.begin(request(tmp_path / str(number), str(number)), {"state": State(a=1)}, {})
        report(writer, str(number))
    assert [writer.report(str(number)) is None for number in range(6)] == [True, True, False, False, False, False]
    writer.close(10)


def test_random_states_go_on(tmp_path: Path) -> None:
    writer = ShareWriter(0, 1, CPU)
    writer.begin(request(tmp_path / "c"), {"state": State(a=1)}, {})
    expected = torch.rand(3)
    found = report(writer, "a")
    assert isinstance(found, Share)
    writer.set_random(found.random)
    assert torch.equal(torch.rand(3), expected)
    writer.close(10)
