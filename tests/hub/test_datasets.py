"""Batches of datasets.Dataset, padded by a collate function of transformers, reach replicas as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import transformers
from torch.utils.data import DataLoader

import raydist as rd
from tests.hub.harness import BATCH, ROWS, assert_same, seeded, train_on_replicas, train_plainly
from tests.hub.models import CLASSES, WORDS, bert, own_loss

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def tokenizer() -> Any:
    """A tokenizer of numbered words."""
    words = {"[PAD]": 0, "[UNK]": 1, **{f"word{k}": k for k in range(2, WORDS)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]")


def tokenised() -> datasets.Dataset:
    """Texts of two to six words."""
    draw = np.random.default_rng(0)
    texts = [" ".join(f"word{k}" for k in draw.integers(2, WORDS, 2 + row % 5)) for row in range(ROWS)]
    table = datasets.Dataset.from_dict({"text": texts, "labels": [row % CLASSES for row in range(ROWS)]})
    words = tokenizer()
    return table.map(lambda row: words(row["text"], return_token_type_ids=False), remove_columns=["text"])


def padding_loader(table: datasets.Dataset) -> DataLoader[Any]:
    collate = transformers.DataCollatorWithPadding(tokenizer())
    return DataLoader(table, batch_size=BATCH, collate_fn=collate)


@pytest.mark.parametrize("source", ["loader", "directory"])
def test_padded_batches_of_a_dataset(source: str, two: rd.MirroredStrategy, tmp_path: Path) -> None:
    table = tokenised()
    plain = train_plainly(seeded(bert), list(padding_loader(table)), own_loss)
    data: Any = padding_loader(table)
    if source == "directory":
        table.save_to_disk(tmp_path / "table")
        data = rd.Dataset.from_huggingface(str(tmp_path / "table")).padded_batch(BATCH)
    model = train_on_replicas(two, bert, data, own_loss)
    assert_same(model.state_dict(), plain.state_dict())
