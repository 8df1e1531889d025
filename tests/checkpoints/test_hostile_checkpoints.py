"""Checkpoints of strangers: a manifest with a checksum of its own, pickles in the place of tensors, links (K6)."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from torch import nn

import raydist as rd
from tests.chaos.extent import how_many

COUNT = how_many(40, 10_000)


class Bomb:
    """What it does when it is unpickled leaves a file."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._reduced = (call, args)

    def __reduce__(self) -> Any:
        return self._reduced


def objects() -> tuple[rd.Checkpoint, nn.Module, rd.State]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
    progress = rd.State(epoch=3, seen=[1, {"a": 2}])
    return (
        rd.Checkpoint(model=model, optimizer=optimizer, more=[scheduler, rd.Mean()], progress=progress),
        model,
        progress,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    objects()[0].save(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def seal(path: Path, content: Any) -> None:
    saved = json.dumps(content).encode()
    (path / "manifest.json").write_bytes(b'{"crc32c": %d, "saved": %b}' % (google_crc32c.value(saved), saved))


def parts_of(content: Any) -> list[tuple[Any, Any]]:
    """Every place in JSON: (what holds it, its key)."""
    found = []
    keys = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in list(keys):
        found.append((content, key))
        found += parts_of(content[key])
    return found


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 40, 1 << 70, 0.5, 1e308, "", "x", "../x", [], {}, [[]], [0, 1], [1 << 50], "\ud800"),
    *({"$tuple": [1]}, {"$dict": [[[1], 2]]}, {"$tensor": "0.weight"}, {"$scalar": "0.weight"}, {"$bytes": "AAAA"}),
    *({"$float": "nan"}, {"$counter": [[1, 2]]}, "F32", "model.safetensors", ["os", "system"], "torch.nn:Linear"),
    *("__class__", {"__reduce__": 1}),
)


def tamper(content: Any, draw: random.Random) -> str:
    holder, key = draw.choice(parts_of(content))
    kind = draw.choice(("odd", "odd", "gone", "swapped", "renamed"))
    if kind == "gone":
        del holder[key]
    elif kind == "swapped":
        other, there = draw.choice(parts_of(content))
        holder[key], other[there] = json.loads(json.dumps([other[there], holder[key]]))
    elif kind == "renamed" and isinstance(holder, dict):
        holder[draw.choice(("__class__", "x", "__dict__", "state_dict", "0.weight", "$tuple"))] = holder.pop(key)
    else:
        holder[key] = draw.choice(ODD)
    return f"{kind} at {key!r}"


@pytest.mark.timeout(60 + COUNT // 10)
def test_hostile_manifests_are_errors(path: Path) -> None:
    """With a right checksum, what is read may be other values; but no error that is not ours, and nothing half done."""
    good = (path / "manifest.json").read_bytes()
    outcomes: dict[str, int] = {}
    for number in range(COUNT):
        draw = random.Random(number)
        content = json.loads(good)["saved"]
        what = [tamper(content, draw) for _ in range(draw.randrange(1, 3))]
        seal(path, content)
        checkpoint, model, progress = objects()
        with torch.no_grad():
            model.get_parameter("0.weight").fill_(9)
        try:
            checkpoint.restore(path)
            outcome = "restored"
        except rd.RaydistError as error:
            outcome = type(error).__name__
            assert bool((model.get_parameter("0.weight") == 9).all()), (number, what)
            assert progress.state_dict() == {"epoch": 3, "seen": [1, {"a": 2}]}, (number, what)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(outcomes)
    assert outcomes["DataLossError"] > COUNT // 4


def bombs(canary: Path) -> list[bytes]:
    """Files that do something when they are unpickled, in the forms in which files of torch come."""
    made = []
    for bomb in (Bomb(os.mkdir, str(canary)), Bomb(exec, f"open({str(canary)!r}, 'w')")):
        plain = pickle.dumps(bomb)
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("archive/data.pkl", plain)
            file.writestr("archive/version", "3\n")
        old: tuple[Any, ...] = (0x1950A86A20F9469CFC6C, 1001, {}, bomb, [])
        legacy = b"".join(map(pickle.dumps, old))
        header = json.dumps({"__metadata__": {"pickle": plain.hex()}}).encode()
        safetensors = struct.pack("<Q", len(header)) + header + plain
        made += [plain, pickle.dumps(bomb, 0), archive.getvalue(), legacy, safetensors]
    return made


def test_nothing_is_unpickled(path: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    files = ("model.safetensors", "optimizer.safetensors", "manifest.json")
    good = {name: (path / name).read_bytes() for name in files}
    made = bombs(canary)
    pickle.loads(made[0])  # they do work
    assert canary.exists()
    canary.rmdir()
    for name, bomb in itertools.product(files, made):
        (path / name).write_bytes(bomb)
        if name != "manifest.json":  # a stranger's manifest would know it
            content = json.loads(good["manifest.json"])["saved"]
            file = next(each for each in content["files"] if each["name"] == name)
            crc = google_crc32c.value(bomb)
            file.update(num_bytes=len(bomb), crc32c=crc, header=[len(bomb), crc], tensors={})
            seal(path, content)
        with pytest.raises(rd.RaydistError):
            objects()[0].restore(path)
        for each, content in good.items():
            (path / each).write_bytes(content)
        assert not canary.exists()
    objects()[0].restore(path)


def test_a_manifest_that_names_a_link(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)
    with pytest.raises(rd.DataLossError, match="it is a link"):
        objects()[0].restore(path)
    (path / "manifest.json").rename(tmp_path / "manifest")
    (path / "manifest.json").symlink_to(tmp_path / "manifest")
    with pytest.raises(rd.DataLossError, match="it is a link"):
        objects()[0].restore(path)
