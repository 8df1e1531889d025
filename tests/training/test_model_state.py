from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.training.model_state import pack
from raydist.training.saving import write_model_file
from tests.training.toys import compiled, regression, small_net


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
    loaded = rd.Model.load(tmp_path / "model")
    assert isinstance(loaded.module, Net)
    assert same_state(loaded.module, net)
    assert loaded.module.note == "trained"
    loaded.save(tmp_path / "again")
    assert same_state(rd.Model.load(tmp_path / "again").module, net)


def test_a_class_without_arguments_needs_no_config(tmp_path: Path) -> None:
    net = Net()
    rd.Model(net).save(tmp_path / "model")
    assert same_state(rd.Model.load(tmp_path / "model").module, net)


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


def test_a_class_that_needs_arguments_says_so(tmp_path: Path) -> None:
    rd.Model(NeedsWidth(3)).save(tmp_path / "model")
    with pytest.raises(rd.InvalidArgumentError, match=r"NeedsWidth needs constructor arguments.*module=.*config="):
        rd.Model.load(tmp_path / "model")


def test_a_class_that_can_not_be_imported_says_so(tmp_path: Path) -> None:
    class Local(nn.Module):
        pass

    rd.Model(Local()).save(tmp_path / "model")
    with pytest.raises(rd.InvalidArgumentError, match="must be importable.*module="):
        rd.Model.load(tmp_path / "model")


@pytest.mark.parametrize("name", ["os:getcwd", "subprocess:Popen"])
def test_nothing_but_a_module_class_is_called(tmp_path: Path, name: str) -> None:
    tensors, manifest = pack(small_net(), None, None)
    write_model_file(tmp_path / "model", tensors, replace(manifest, module_class=name, recipe=None))
    with pytest.raises(rd.InvalidArgumentError, match=f"names {name} .* which is no torch.nn.Module"):
        rd.Model.load(tmp_path / "model")
