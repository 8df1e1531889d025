"""Model files."""

from __future__ import annotations

import json
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
from raydist.training.architecture import architecture_of, build_module
from raydist.training.model_file import ModelManifest, digests, pack, read_model_file, snapshot, write_model_file
from tests.refused import check_refused
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


def test_files_and_uris_are_written_and_read(tmp_path: Path) -> None:
    uri = "memory://models/new/model.safetensors"
    for path in (tmp_path / "new" / "model.safetensors", uri, f"file://{tmp_path}/model"):
        write_model_file(path, TENSORS, manifest())
        tensors, found = read_model_file(path)
        assert found == manifest()
        assert tensors.keys() == TENSORS.keys()
        assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
        assert tensors["module.b"].dtype is torch.bfloat16
    with safe_open(tmp_path / "model", framework="pt") as content:  # other readers of safetensors
        assert content.metadata().keys() == {"raydist.model", "raydist.sha256"}
        assert all(torch.equal(content.get_tensor(name), tensor) for name, tensor in TENSORS.items())
    with pytest.raises(rd.NotFoundError, match="memory://models/new/absent"):
        read_model_file("memory://models/new/absent")
    with pytest.raises(rd.InvalidArgumentError, match="memory://models/' names none"):
        write_model_file("memory://models/", TENSORS, manifest())


def test_damaged_foreign_and_later_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model")
    whole = path.read_bytes()
    for length in (0, 4, 50, 600, -1):
        path.write_bytes(whole[:length])
        with pytest.raises(rd.DataLossError, match="truncated, damaged") as caught:
            pytest.fail(f"{length}: {read_model_file(path)}")
        assert caught.value.path == str(path)
    for position in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(rd.DataLossError, match="damaged|has no raydist manifest"):
            pytest.fail(f"{position}: {read_model_file(path)}")
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(rd.DataLossError, match="has no raydist manifest"):
        read_model_file(path)
    write_model_file(path, TENSORS, manifest(version=2))
    with pytest.raises(rd.InvalidArgumentError, match="has format version 2, this raydist reads version 1"):
        read_model_file(path)


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="JSON values only.*config"):
        write_model_file(tmp_path / "model", TENSORS, manifest(config={"fn": print}))
    assert not list(tmp_path.iterdir())
    module = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(10, 2)})
    with pytest.raises(rd.InvalidArgumentError, match=r"the module has 'words'. Save an rd.Checkpoint"):
        pack(module, None, None)


def test_a_snapshot_shares_no_memory() -> None:
    shared = torch.zeros(3)
    copies = snapshot({"a": shared, "b": shared[:2], "c": "text"})
    shared.fill_(1.0)
    assert copies["a"].tolist() == [0.0] * 3
    assert copies["b"].tolist() == [0.0] * 2
    assert copies["c"] == "text"


def test_a_death_at_any_moment_leaves_the_old_file(tmp_path: Path) -> None:
    path = written(tmp_path / "model")
    before = path.read_bytes()
    for moment in ("within_file", "before_flush", "after_flush", "before_rename"):

        def die(name: str, moment: str = moment) -> None:
            if name == f"checkpoint.{moment}":
                raise KeyboardInterrupt

        with installed(die), pytest.raises(KeyboardInterrupt):
            write_model_file(path, {**TENSORS, "module.a": torch.zeros(10, 10)}, manifest())
        assert path.read_bytes() == before, moment


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


def test_the_saved_class_is_built_again_or_a_module_loaded_in_place(tmp_path: Path) -> None:
    net = Net(width=4, bias=False)
    net.note = "trained"
    rd.Model(net, config={"width": 4, "bias": False}).save(tmp_path / "model")
    loaded = rd.Model.load(tmp_path / "model", module=Net)
    assert isinstance(loaded.module, Net)
    assert same_state(loaded.module, net)
    assert loaded.module.note == "trained"
    loaded.save(tmp_path / "again")
    assert same_state(rd.Model.load(tmp_path / "again", lambda width, bias: Net(width, bias=bias)).module, net)
    other = Net(width=4, bias=False)
    assert not same_state(net, other)
    assert rd.Model.load(tmp_path / "model", other).module is other
    assert same_state(net, other)


def test_training_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    optimizers: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adam, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    ]
    for kind, settings in optimizers:
        whole, first, second = (small_net() for _ in range(3))
        model = compiled(whole, optimizer=kind(whole.parameters(), **settings))
        model.fit(regression(12, 4), epochs=2, verbose=False)
        start = compiled(first, optimizer=kind(first.parameters(), **settings))
        start.fit(regression(12, 4), verbose=False)
        start.save(tmp_path / "model")
        optimizer = kind(second.parameters(), **(settings | {"lr": 123.0}))
        resumed = rd.Model.load(tmp_path / "model", second, optimizer)
        resumed.compile(optimizer, nn.MSELoss())
        resumed.fit(regression(12, 4), verbose=False)
        assert same_state(second, whole), kind
        assert optimizer.param_groups[0]["lr"] == pytest.approx(float(settings["lr"])), kind


def test_modules_and_optimizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    net = small_net()
    rd.Model(Net(5)).save(tmp_path / "net")
    compiled(net).save(tmp_path / "trained")
    rd.Model(net).save(tmp_path / "untrained")
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    cases: list[tuple[Any, str]] = [
        (("net", Net(6)), r"must fit the module, a Net: Error.*\n.*size mismatch"),
        (("net", 3), "or a class or function that makes one, got 3"),
        (("net", dict), r"returned \{\}"),
        (("trained", net, torch.optim.AdamW(net.parameters())), "to be restored, AdamW; it holds that of SGD"),
        (("trained", net, torch.optim.SGD([next(net.parameters())], lr=0.1)), "must fit the optimizer"),
        (("untrained", net, sgd), "it holds none"),
    ]
    tensors, manifest = pack(net, None, None)
    forged: list[Any] = [{"class": "SGD"}, {}, {"class": "SGD", "values": 3}]
    for number, optimizer in enumerate(forged):
        write_model_file(tmp_path / f"{number}", tensors, replace(manifest, optimizer=optimizer))
        cases.append(((f"{number}", net, sgd), "optimizer"))
    check_refused(lambda case: rd.Model.load(tmp_path / case[0], *case[1:]), cases)


def test_other_classes_ask_for_the_module(tmp_path: Path) -> None:
    class Local(nn.Module):
        pass

    for net in (NeedsWidth(3), Net(), Local(), nn.Sequential(NeedsWidth(3))):
        rd.Model(net).save(tmp_path / "model")
        with pytest.raises(rd.InvalidArgumentError, match=rf"saved from '.*:.*{type(net).__name__}'.*module=\.\.\."):
            rd.Model.load(tmp_path / "model")


NAMES = [
    "os:getcwd",
    "subprocess:Popen",
    "mine_to_import:Net",
    "torch.nn.modules.linear:Linear",
    "torch.nn.modules:Module",
]


def test_a_file_makes_nobody_import_or_call_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_import.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    tensors, manifest = pack(small_net(), None, None)
    for name in NAMES:
        forged = replace(manifest, module_class=name, architecture=None, config={})
        write_model_file(tmp_path / "model", tensors, forged)
        with pytest.raises(rd.InvalidArgumentError, match="module="):
            pytest.fail(f"{name}: {rd.Model.load(tmp_path / 'model')}")
    assert "mine_to_import" not in sys.modules


def test_a_file_of_before_says_the_class_and_its_config(tmp_path: Path) -> None:
    linear = nn.Linear(3, 2)
    tensors, manifest = pack(linear, None, {"in_features": 3, "out_features": 2})
    write_model_file(tmp_path / "model", tensors, replace(manifest, architecture=None))
    assert same_state(rd.Model.load(tmp_path / "model").module, linear)


MODULES: list[nn.Module] = [
    nn.Linear(2, 3, bias=False).double(),
    nn.Linear(2, 3).to(torch.bfloat16),
    nn.Conv2d(4, 2, (3, 1), padding=1, groups=2, bias=False),
    nn.Conv1d(3, 3, 3, padding="same", padding_mode="circular"),
    nn.BatchNorm2d(4, eps=1e-3, affine=False),
    nn.LayerNorm((3, 4), bias=False),
    nn.Embedding(10, 4, padding_idx=1),
    nn.GRU(3, 4, 2, batch_first=True, dropout=0.25),
    nn.LSTM(3, 4, bidirectional=True, proj_size=2),
    nn.MultiheadAttention(8, 4),
    nn.ReLU(inplace=True),
    nn.Softmax(dim=1),
    nn.Unflatten(1, (2, 2)),
    nn.Sequential(),
    nn.ModuleDict({"a": nn.ModuleList([nn.Linear(1, 2), nn.Tanh()])}),
    nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.ReLU(), nn.Flatten()), nn.Linear(8, 1)),
]


def test_modules_of_torch() -> None:
    for module in MODULES:
        description = json.loads(json.dumps(architecture_of(module)))
        built = build_module(description, module.state_dict())
        assert repr(built) == repr(module)
        assert [value.dtype for value in built.parameters()] == [value.dtype for value in module.parameters()], module
        assert all(value.device.type == "cpu" for value in built.state_dict().values()), module


class Mine(nn.Linear):
    pass


def test_what_cannot_be_said() -> None:
    hooked, own_forward = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *args: None)
    own_forward.__dict__["forward"] = lambda x: x
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    hole = nn.Sequential(nn.Linear(2, 2))
    hole.register_module("none", None)
    merged = nn.Sequential(nn.BatchNorm1d(2))
    assert architecture_of(merged) is not None
    rd.set_aggregation(merged, "0.running_mean", aggregation="first")  # `Model.load` asks for the module and so for it
    modules: list[nn.Module] = [
        *(hooked, nn.Sequential(hooked), own_forward, Mine(2, 3), nn.Sequential(nn.Linear(2, 2), Mine(2, 2))),
        *(nn.TransformerEncoderLayer(8, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.LazyLinear(3)),
        *(tied, nn.Sequential(tied[0], tied[0]), hole, merged),
    ]
    for module in modules:
        assert architecture_of(module) is None, module


LINEAR = {"class": "Linear", "arguments": {"in_features": 2, "out_features": 3, "bias": True}, "dtype": "float32"}


def test_forged_descriptions() -> None:
    forged: list[Any] = [
        *(None, [], {}, {"class": "Module", "arguments": {}}, {"class": "__import__", "arguments": {}}),
        *({"class": ["Linear"], "arguments": {}}, {"class": "os.system", "arguments": {"command": "true"}}),
        LINEAR | {"arguments": {"in_features": 1 << 40, "out_features": 1 << 40}},
        LINEAR | {"arguments": {"in_features": -1, "out_features": 3}},
        LINEAR | {"arguments": {"in_features": "2", "out_features": 3}},
        LINEAR | {"arguments": {"in_features": 2, "out_features": 3, "device": "cuda"}},
        LINEAR | {"arguments": {"in_features": {"a": 1}, "out_features": 3}},
        *(
            LINEAR | change
            for change in ({"arguments": 3}, {"dtype": "load"}, {"dtype": "int64"}, {"dtype": "float64"})
        ),
        {"class": "LSTM", "arguments": {"input_size": 1, "hidden_size": 1, "num_layers": 1 << 40}},
        {"class": "Sequential", "children": [["a.b", LINEAR]]},
        {"class": "Sequential", "children": 3},
    ]
    state = nn.Linear(2, 3).state_dict()
    check_refused(lambda each: build_module(each, state), [(each, r"module=\.\.\.") for each in forged])
    deep: Any = LINEAR
    for _ in range(5000):
        deep = {"class": "Sequential", "children": [["0", deep]]}
    with pytest.raises(rd.InvalidArgumentError, match="nested more than 50 deep"):
        build_module(deep, {})
