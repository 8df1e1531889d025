"""Models of transformers train on replicas as on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import raydist as rd
from tests.hub.harness import BATCH, assert_same, batches_of, check_equal, seeded, sgd, train_plainly
from tests.hub.models import CLASSES, TEXT, TRANSFORMERS, bert, checkpointed_gpt2, gpt2, padding_mask

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_reach_the_parameters_of_one_device(name: str, two: rd.MirroredStrategy) -> None:
    check_equal(two, TRANSFORMERS[name])


def test_the_parameters_depend_on_every_row(two: rd.MirroredStrategy) -> None:
    """The comparison could fail: without one row it does."""
    case = TRANSFORMERS["BERT"]
    model = check_equal(two, case)
    rows = {name: value.clone() for name, value in case.rows.items()}
    rows["labels"][-1] = (rows["labels"][-1] + 1) % CLASSES
    other = train_plainly(seeded(bert), batches_of(rows, 2), case.loss)
    with pytest.raises(AssertionError):
        assert_same(model.state_dict(), other.state_dict(), 1e-6)


def test_a_saved_directory_is_loaded_in_the_scope_and_a_trained_model_outside(
    two: rd.MirroredStrategy, tmp_path: Path
) -> None:
    seeded(bert).save_pretrained(tmp_path / "start")

    def load() -> Any:
        return transformers.BertForSequenceClassification.from_pretrained(tmp_path / "start", dtype=torch.float64)

    case = TRANSFORMERS["BERT"]
    model = check_equal(two, replace(case, make=load))
    model.save_pretrained(tmp_path / "trained")
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "trained", dtype=torch.float64)
    assert_same(again.state_dict(), model.state_dict(), 0.0)
    assert again.config.num_labels == CLASSES


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, two: rd.MirroredStrategy) -> None:
    model = check_equal(two, replace(TRANSFORMERS["GPT-2"], make=partial(checkpointed_gpt2, reentrant)))
    assert model.is_gradient_checkpointing


def test_bfloat16(two: rd.MirroredStrategy) -> None:
    """bfloat16 has 8 bits: replicas round other sums than one device does."""
    case = TRANSFORMERS["Llama"]
    model = check_equal(two, replace(case, make=lambda: case.make().bfloat16(), tolerance=0.05))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_labels_that_are_ignored_count_over_the_global_batch(two: rd.MirroredStrategy) -> None:
    """`num_items_in_batch` of the global batch, and gradients that are summed, give the mean over all tokens."""
    labels = torch.where(padding_mask() == 1, TEXT["input_ids"], -100)
    rows = {**TEXT, "labels": labels}
    # The loss of a causal model is computed in float32 by transformers.
    plain = train_plainly(seeded(gpt2), batches_of(rows), lambda model, batch: model(**batch).loss)

    with two.scope():
        model = seeded(gpt2)
        optimizer = sgd(model)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        count = rd.get_replica_context().all_reduce(rd.ReduceOp.SUM, (batch["labels"][:, 1:] != -100).sum())
        output = model(**batch, num_items_in_batch=count)
        output.loss.backward()
        optimizer.step()
        return output

    for batch in two.distribute_dataset(rd.Dataset.from_tensor_slices(rows).batch(BATCH)):
        output = two.run(step, args=(batch,), options=rd.RunOptions(gradient_reduce_op=rd.ReduceOp.SUM))
    assert_same(model.state_dict(), plain.state_dict(), 1e-4)
    assert two.gather(output.logits, axis=0).shape == (5, *TEXT["input_ids"].shape[1:], 50)
    assert type(two.local_results(output)[0]).__name__ == "CausalLMOutputWithCrossAttentions"
    assert model.lm_head.weight is model.transformer.wte.weight
