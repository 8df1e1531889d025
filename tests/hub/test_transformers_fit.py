"""`compile(loss="model")`: fit, evaluate and predict of models of transformers are those of one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.nn import functional as F

import raydist as rd
from tests.hub.harness import BATCH, Case, Tensors, assert_same, batches_of, seeded, sgd, train_plainly
from tests.hub.models import TEXT, TRANSFORMERS, gpt2, llama, own_loss, padding_mask, tokens

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

# transformers computes the loss of causal models in float32.
FLOAT32_LOSS = 1e-5


SPOKEN = torch.where(padding_mask() == 1, TEXT["input_ids"], -100)  # few labels in some rows, many in others
WRITTEN = torch.where(padding_mask(5) == 1, tokens(5), -100)

# By model: rows that hold its labels, and the tolerance.
FITTED: dict[str, tuple[Tensors, float]] = {
    "BERT": (TRANSFORMERS["BERT"].rows, 1e-9),
    "GPT-2": ({**TEXT, "labels": SPOKEN}, FLOAT32_LOSS),
    "Llama": ({**TEXT, "labels": SPOKEN}, FLOAT32_LOSS),
    "LoRA": ({**TEXT, "labels": SPOKEN}, FLOAT32_LOSS),
    "T5": ({**TEXT, "labels": WRITTEN}, FLOAT32_LOSS),
}


def compiled(strategy: rd.Strategy, case: Case, loss: Any = "model", **settings: Any) -> rd.Model:
    with strategy.scope():
        model = rd.Model(seeded(case.make))
        model.compile(sgd(model.module), loss, **settings)
    return model


def plain_loss(model: Any, rows: Tensors) -> float:
    with torch.no_grad():
        return float(model.eval()(**rows).loss)


@pytest.mark.parametrize("name", FITTED)
def test_fit_evaluate_and_predict_are_those_of_one_device(name: str, two: rd.MirroredStrategy) -> None:
    (given, tolerance), case = FITTED[name], TRANSFORMERS[name]
    rows = dict(given)
    plain = train_plainly(seeded(case.make), batches_of(rows, 2), own_loss)
    data = rd.Dataset.from_tensor_slices(rows).batch(BATCH)
    model = compiled(two, case)
    model.fit(data, epochs=2, verbose=False)
    assert_same(model.module.state_dict(), plain.state_dict(), tolerance)
    # The loss of all rows at once is the mean over all labels that count.
    found = model.evaluate(data, verbose=False)["loss"]
    assert found == pytest.approx(plain_loss(plain, rows), rel=max(tolerance, 1e-6))
    with torch.no_grad():
        expected = plain(**rows).logits
    predicted = model.predict(data, verbose=False)["logits"]
    torch.testing.assert_close(predicted, expected, rtol=tolerance, atol=tolerance)


def test_a_loss_function_takes_the_models_outputs(two: rd.MirroredStrategy) -> None:
    """They hold a cache of keys and values beside the logits, which is None in predictions."""
    ids = TEXT["input_ids"]

    def next_token(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), target[:, 1:])

    plain = train_plainly(
        seeded(gpt2), batches_of({"input_ids": ids}), lambda model, rows: next_token(model(**rows), rows["input_ids"])
    )
    model = compiled(two, TRANSFORMERS["GPT-2"], next_token)
    model.fit(ids, ids, batch_size=BATCH, shuffle=False, verbose=False)
    assert_same(model.module.state_dict(), plain.state_dict())
    found = model.predict(ids, batch_size=BATCH, verbose=False)
    with torch.no_grad():
        expected = plain.eval()(ids)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-9)
    assert expected.past_key_values is not None
    assert found.past_key_values is None


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bits(precision: Any, dtype: torch.dtype, two: rd.MirroredStrategy) -> None:
    """A bare loop under autocast, with a scaler for float16. Replicas round other sums than one device does."""
    rows = {**TEXT, "labels": SPOKEN}
    case = replace(TRANSFORMERS["GPT-2"], make=lambda: gpt2().float(), rows=rows)
    plain: Any = seeded(case.make)
    optimizer, scaler = sgd(plain), torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for batch in batches_of(rows, 2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = plain(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model = compiled(two, case, precision=precision)
    data = rd.Dataset.from_tensor_slices(rows).batch(BATCH)
    model.fit(data, epochs=2, verbose=False)
    assert_same(model.module.state_dict(), plain.state_dict(), 0.01)
    assert {value.dtype for value in model.module.parameters()} == {torch.float32}
    if precision == "fp16":
        assert model.checkpoint_objects()["scaler"].state_dict() == scaler.state_dict()
    assert model.predict(data, verbose=False)["logits"].dtype == torch.float32


def test_save_pretrained_of_adapters(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    rows = {**TEXT, "labels": SPOKEN}
    model = compiled(two, replace(TRANSFORMERS["LoRA"], rows=rows))
    model.fit(rd.Dataset.from_tensor_slices(rows).batch(BATCH), verbose=False)
    module: Any = model.module
    module.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(seeded(llama), tmp_path)
    assert_same(again.double().state_dict(), module.state_dict(), 0.0)
