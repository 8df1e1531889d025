"""Model files."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import raydist as rd
from raydist.core.failpoints import installed
from raydist.training.model_file import ModelManifest, digests, pack, read_model_file, snapshot, write_model_file
from tests.training.toys import compiled, regression, small_net

TENSORS = {
    "module.a": torch.arange(100, dtype=torch.float64).reshape(10, 10),
    "module.b": torch.ones(3, dtype=torch.bfloat16),
    "module.none": torch.empty(0, 4),
    "module.count": torch.tensor(7),
}


def manifest(**changes: object) -> ModelManifest:
    fields: dict[str, object] = {
        "module_class": "m:N",
        "config": {"width": 2},
        "extra": {},
        "optimizer": None,
        "sha256": digests(TENSORS),
    }
    return ModelManifest(**(fields | changes))  # type: ignore[arg-type]  # one dict for fields of several types


def written(path: Path) -> Path:
    write_model_file(path, TENSORS, manifest())
    return path


def test_round_trip(tmp_path: Path) -> None:
    tensors, found = read_model_file(written(tmp_path / "new" / "model.safetensors"))
    assert found == manifest()
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert tensors["module.b"].dtype is torch.bfloat16


@pytest.mark.parametrize("length", [0, 4, 50, 600, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "model")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(rd.DataLossError, match="truncated, damaged") as caught:
        read_model_file(path)
    assert caught.value.path == str(path)


def test_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "model")
    whole = path.read_bytes()
    for position in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(rd.DataLossError, match="damaged|has no raydist manifest"):
            read_model_file(path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(rd.DataLossError, match="has no raydist manifest"):
        read_model_file(path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    write_model_file(tmp_path / "model", TENSORS, manifest(version=2))
    with pytest.raises(rd.InvalidArgumentError, match="has format version 2, this raydist reads version 1"):
        read_model_file(tmp_path / "model")


def test_what_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="JSON values only.*config"):
        write_model_file(tmp_path / "model", TENSORS, manifest(config={"fn": print}))
    assert not list(tmp_path.iterdir())


def test_a_snapshot_shares_no_memory() -> None:
    shared = torch.zeros(3)
    copies = snapshot({"a": shared, "b": shared[:2], "c": "text"})
    shared.fill_(1.0)
    assert copies["a"].tolist() == [0.0] * 3
    assert copies["b"].tolist() == [0.0] * 2
    assert copies["c"] == "text"


def test_a_uri_is_written_and_read(tmp_path: Path) -> None:
    uri = "memory://models/new/model.safetensors"
    write_model_file(uri, TENSORS, manifest())
    tensors, found = read_model_file(uri)
    assert found == manifest()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    write_model_file(f"file://{tmp_path}/model", TENSORS, manifest())
    assert read_model_file(tmp_path / "model")[1] == manifest()
    with pytest.raises(rd.NotFoundError, match="memory://models/new/absent"):
        read_model_file("memory://models/new/absent")
    with pytest.raises(rd.InvalidArgumentError, match="memory://models/' names none"):
        write_model_file("memory://models/", TENSORS, manifest())


def test_other_readers_of_safetensors_find_tensors_and_manifest(tmp_path: Path) -> None:
    with safe_open(written(tmp_path / "model"), framework="pt") as content:
        assert content.metadata().keys() == {"raydist.model", "raydist.sha256"}
        assert all(torch.equal(content.get_tensor(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("moment", ["within_file", "before_flush", "after_flush", "before_rename"])
def test_a_death_at_any_moment_leaves_the_old_file(moment: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model")
    before = path.read_bytes()

    def die(name: str) -> None:
        if name == f"checkpoint.{moment}":
            raise KeyboardInterrupt

    with installed(die), pytest.raises(KeyboardInterrupt):
        write_model_file(path, {**TENSORS, "module.a": torch.zeros(10, 10)}, manifest())
    assert path.read_bytes() == before


class Net(nn.Module):
    """Importable, with settings, a buffer, tied parameters and state that is no tensor."""

    def __init__(self, width: int = 2, *, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, width, bias=bias).double()
        self.again = self.first
        self.last = nn.Linear(width, 1).double()
        self.norm = nn.BatchNorm1d(width).double()
        self.note = "new"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)))
        return y

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class NeedsWidth(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 1)


def same_state(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(left[k], right[k]) if isinstance(left[k], torch.Tensor) else left[k] == right[k] for k in left
    )


def test_the_saved_class_is_built_again(tmp_path: Path) -> None:
    net = Net(width=4, bias=False)
    net.note = "trained"
    rd.Model(net, config={"width": 4, "bias": False}).save(tmp_path / "model")
    loaded = rd.Model.load(tmp_path / "model", module=Net)
    assert isinstance(loaded.module, Net)
    assert same_state(loaded.module, net)
    assert loaded.module.note == "trained"
    loaded.save(tmp_path / "again")
    assert same_state(rd.Model.load(tmp_path / "again", lambda width, bias: Net(width, bias=bias)).module, net)


def test_a_given_module_is_loaded_in_place(tmp_path: Path) -> None:
    net, other = Net(5), Net(5)
    rd.Model(net).save(tmp_path / "model")
    assert not same_state(net, other)
    assert rd.Model.load(tmp_path / "model", other).module is other
    assert same_state(net, other)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adam, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    ],
)
def test_training_goes_on_as_if_never_interrupted(tmp_path: Path, kind: Any, settings: dict[str, Any]) -> None:
    whole = small_net()
    model = compiled(whole, optimizer=kind(whole.parameters(), **settings))
    model.fit(regression(12, 4), epochs=2, verbose=False)

    first, second = small_net(), small_net()
    start = compiled(first, optimizer=kind(first.parameters(), **settings))
    start.fit(regression(12, 4), verbose=False)
    start.save(tmp_path / "model")
    optimizer = kind(second.parameters(), **(settings | {"lr": 123.0}))
    resumed = rd.Model.load(tmp_path / "model", second, optimizer)
    resumed.compile(optimizer, nn.MSELoss())
    resumed.fit(regression(12, 4), verbose=False)
    assert same_state(second, whole)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(float(settings["lr"]))


def test_a_module_of_another_shape_is_refused(tmp_path: Path) -> None:
    rd.Model(Net(5)).save(tmp_path / "model")
    with pytest.raises(rd.InvalidArgumentError, match=r"must fit the module, a Net: Error.*\n.*size mismatch"):
        rd.Model.load(tmp_path / "model", Net(6))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    net = small_net()
    compiled(net).save(tmp_path / "model")
    with pytest.raises(rd.InvalidArgumentError, match="to be restored, AdamW; it holds that of SGD"):
        rd.Model.load(tmp_path / "model", net, torch.optim.AdamW(net.parameters()))
    with pytest.raises(rd.InvalidArgumentError, match="must fit the optimizer"):
        rd.Model.load(tmp_path / "model", net, torch.optim.SGD([net[0].weight], lr=0.1))  # type: ignore[index]
    rd.Model(net).save(tmp_path / "untrained")
    with pytest.raises(rd.InvalidArgumentError, match="it holds none"):
        rd.Model.load(tmp_path / "untrained", net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_other_classes_ask_for_the_module(tmp_path: Path) -> None:
    class Local(nn.Module):
        pass

    for net in (NeedsWidth(3), Net(), Local(), nn.Sequential(NeedsWidth(3))):
        rd.Model(net).save(tmp_path / "model")
        with pytest.raises(rd.InvalidArgumentError, match=rf"saved from '.*:.*{type(net).__name__}'.*module=\.\.\."):
            rd.Model.load(tmp_path / "model")


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    rd.Model(Net()).save(tmp_path / "model")
    with pytest.raises(rd.InvalidArgumentError, match="or a class or function that makes one, got 3"):
        rd.Model.load(tmp_path / "model", 3)  # type: ignore[arg-type]  # a user's mistake
    with pytest.raises(rd.InvalidArgumentError, match=r"returned \{\}"):
        rd.Model.load(tmp_path / "model", dict)  # type: ignore[arg-type]  # as above


NAMES = [
    "os:getcwd",
    "subprocess:Popen",
    "mine_to_import:Net",
    "torch.nn.modules.linear:Linear",
    "torch.nn.modules:Module",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_makes_nobody_import_or_call_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "mine_to_import.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    tensors, manifest = pack(small_net(), None, None)
    forged = replace(manifest, module_class=name, architecture=None, config={})
    write_model_file(tmp_path / "model", tensors, forged)
    with pytest.raises(rd.InvalidArgumentError, match="module="):
        rd.Model.load(tmp_path / "model")
    assert "mine_to_import" not in sys.modules


def test_a_file_of_before_says_the_class_and_its_config(tmp_path: Path) -> None:
    linear = nn.Linear(3, 2)
    tensors, manifest = pack(linear, None, {"in_features": 3, "out_features": 2})
    write_model_file(tmp_path / "model", tensors, replace(manifest, architecture=None))
    assert same_state(rd.Model.load(tmp_path / "model").module, linear)


@pytest.mark.parametrize(
    "change", [{"optimizer": {"class": "SGD"}}, {"optimizer": {}}, {"optimizer": {"class": "SGD", "values": 3}}]
)
def test_a_forged_optimizer(tmp_path: Path, change: Any) -> None:
    net = small_net()
    tensors, manifest = pack(net, None, None)
    write_model_file(tmp_path / "model", tensors, replace(manifest, **change))
    with pytest.raises(rd.InvalidArgumentError):
        rd.Model.load(tmp_path / "model", net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_rows_of_embeddings_are_not_left_out_silently() -> None:
    module = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(10, 2)})
    with pytest.raises(rd.InvalidArgumentError, match=r"the module has 'words'. Save an rd.Checkpoint"):
        pack(module, None, None)
