"""`compile(loss="model")`: modules that compute their own loss, by stand-ins for those of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd
from tests.refused import check_refused
from tests.returned_classes import Cache, ModelOutput

pytestmark = pytest.mark.timeout(180)

VOCABULARY, LENGTH, ROWS, BATCH = 11, 6, 14, 4


class Causal(nn.Module):
    """A language model: labels are shifted inside, -100 does not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        loss = None
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), shifted.view(-1), ignore_index=-100, reduction="mean")
        return ModelOutput(loss=loss, logits=logits, cache=Cache(1))

    def save_pretrained(self, directory: str | Path) -> None:
        torch.save(self.state_dict(), Path(directory) / "weights.pt")


class CausalAsTuple(Causal):
    """With `return_dict=False`."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        found = super().forward(input_ids, labels)
        return (found["loss"], found["logits"]) if "loss" in found else (found["logits"],)


class Regressor(nn.Module):
    """As a head with `problem_type="regression"`: the mean is over `num_labels` as well. Returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 3).double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = nn.MSELoss()(self.embed(input_ids).mean(dim=1), labels[:, :3].double())
        return loss


class Pair(Causal):
    """Returns (sum, denominator), of a loss that torch's functions do not know."""

    bare = False

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        assert labels is not None
        counts = labels != -100
        scores = self.head(self.embed(input_ids)).log_softmax(-1)
        picked = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        total, count = -(picked * counts).sum(), counts.sum()
        if self.bare:
            return {"loss": total / count}
        return {"loss": (total, count)}


def batch_of_texts() -> dict[str, torch.Tensor]:
    """Texts of uneven length; of the first batch, a replica has no label that counts."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, 1 + row % LENGTH :] = -100
    labels[:2] = -100
    labels[9:11] = -100
    return {"input_ids": ids, "labels": labels}


def texts(size: int = BATCH) -> rd.Dataset:
    return rd.Dataset.from_tensor_slices(batch_of_texts()).batch(size)


def bare(net: Any, size: int) -> tuple[nn.Module, float]:
    """Plain PyTorch: a step for each whole batch; then the loss of all rows as one batch."""
    net.bare = True
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5, momentum=0.5)
    data = batch_of_texts()
    for start in range(0, ROWS, size):
        optimizer.zero_grad()
        loss_in(net(**{name: value[start : start + size] for name, value in data.items()})).backward()
        optimizer.step()
    return net, loss_in(net(**data)).item()


def loss_in(found: Any) -> torch.Tensor:
    loss: torch.Tensor = found[0] if isinstance(found, tuple) else found["loss"] if isinstance(found, dict) else found
    return loss


def built(strategy: rd.Strategy, make: Callable[[], nn.Module], **settings: Any) -> rd.Model:
    with strategy.scope():
        model = rd.Model(make())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.5)
        metrics = settings.pop("metrics", tuple)()
        model.compile(optimizer, "model", metrics, **settings)
    return model


def test_parameters_and_losses_are_those_of_whole_batches(strategy: rd.Strategy) -> None:
    cases: list[tuple[Any, int]] = [(Causal, 1), (Causal, 2), (CausalAsTuple, 1), (Regressor, 1), (Pair, 2)]
    for make, accumulate_steps in cases:
        model = built(strategy, make, accumulate_steps=accumulate_steps)
        history = model.fit(texts(), verbose=False)
        expected, loss = bare(make(), BATCH * accumulate_steps)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-15, msg=f"{make} {accumulate_steps}")
        assert len(history.history["loss"]) == 1
        for size in (3, 5, ROWS):  # uneven pieces, and replicas without rows
            found = model.evaluate(texts(size), verbose=False)["loss"]
            assert found == pytest.approx(loss, rel=1e-9), (make, accumulate_steps, size)


def test_predictions_have_no_loss_and_the_module_saves_itself(strategy: rd.Strategy, tmp_path: Path) -> None:
    model = built(strategy, Causal)
    data = batch_of_texts()
    found = model.predict(texts(), verbose=False)
    assert list(found) == ["logits"]
    expected = Causal()(data["input_ids"])["logits"]
    torch.testing.assert_close(torch.as_tensor(found["logits"]), expected)
    assert model.predict(data, batch_size=5, verbose=False)["logits"].shape == expected.shape
    model.module.save_pretrained(tmp_path)  # type: ignore[operator]
    again = Causal()
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    torch.testing.assert_close(again.head.weight, next(model.parameters()))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 3).double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.embed(input_ids).mean(dim=1)
        return ModelOutput(loss=F.cross_entropy(logits, labels), logits=logits)


def test_metrics_see_logits_and_labels(strategy: rd.Strategy) -> None:
    data = {"input_ids": batch_of_texts()["input_ids"], "labels": torch.arange(ROWS) % 3}
    model = built(strategy, Classifier, metrics=lambda: {"accuracy": MulticlassAccuracy(3, average="micro")})
    history = model.fit(data, batch_size=BATCH, epochs=2, shuffle=False, validation_data=data, verbose=False)
    logs = model.evaluate(data, batch_size=5, verbose=False)
    net = copy.deepcopy(model.module)
    expected = net(**data)
    assert logs["loss"] == pytest.approx(expected["loss"].item(), rel=1e-9)
    right = (expected["logits"].argmax(1) == data["labels"]).double().mean()
    assert logs["accuracy"] == pytest.approx(right.item(), rel=1e-6)
    assert history.history["val_loss"][-1] == pytest.approx(logs["loss"], rel=1e-9)
    assert history.history["val_accuracy"][-1] == logs["accuracy"]


class Unknown(nn.Module):
    """A loss whose denominator cannot be seen."""

    def __init__(self, extra: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1, bias=False).double()
        nn.init.ones_(self.inner.weight)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.inner(x) ** 2).mean()
        return loss + self.extra * F.mse_loss(self.inner(x), x[:, :1])


def test_a_loss_that_can_not_be_told_is_an_error_or_said(strategy: rd.Strategy) -> None:
    data = {"x": torch.arange(10.0).double().reshape(5, 2)}
    for extra in (0.0, 1.0):
        model = built(strategy, lambda: Unknown(extra))  # noqa: B023
        calls: list[Any] = [lambda: model.fit(data, batch_size=5), lambda: model.evaluate(data)]  # noqa: B023
        check_refused(lambda call: call(), [(call, 'loss_reduction="mean"') for call in calls])
        model = built(strategy, lambda: Unknown(extra), loss_reduction="mean")  # noqa: B023
        model.fit(data, batch_size=5, verbose=False)
        net = Unknown(extra)
        net(**data).backward()
        assert net.inner.weight.grad is not None
        torch.testing.assert_close(next(model.parameters()), 1 - 0.5 * net.inner.weight.grad, rtol=1e-9, atol=0)


def test_what_a_module_must_return() -> None:
    model = built(rd.OneDeviceStrategy("cpu"), Causal)
    with pytest.raises(rd.SpecError, match="Causal returned a ModelOutput without one. Does the batch hold labels"):
        model.fit({"input_ids": batch_of_texts()["input_ids"]}, verbose=False)
    with pytest.raises(rd.InvalidArgumentError, match="class_weight needs a loss of .prediction, target."):
        model.fit(batch_of_texts(), class_weight={0: 2.0}, verbose=False)
    alone = built(rd.OneDeviceStrategy("cpu"), Regressor)
    with pytest.raises(rd.SpecError, match="predict needs outputs with one entry per input row"):
        alone.predict(batch_of_texts(), verbose=False)
