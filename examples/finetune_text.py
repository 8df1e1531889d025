"""Train a BERT to fill in hidden characters of a text: in a loop of your own, and with `fit`. Needs transformers.

pip install transformers
python examples/finetune_text.py --strategy mirrored --replicas 2
python examples/finetune_text.py --fit --data my.txt --save run/bert      # the same training by rd.Model
python examples/finetune_text.py --model run/bert                         # continues from a saved directory

The model is a tiny one with random weights, and its tokens are bytes, so that nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import raydist as rd
from chosen_strategy import make_strategy
from training_loop import make_parser

BUILT_IN = Path(__file__).parent / "data" / "shakespeare.txt"
LENGTH = 64
PAD, MASK, FIRST_BYTE = 0, 1, 2  # token numbers; byte b is token FIRST_BYTE + b
IGNORED = -100  # the label of a token that does not count
HIDDEN_SHARE = 0.15


def read_lines(file: Path) -> dict[str, np.ndarray]:
    """The lines of a text as tokens: `input_ids` and `attention_mask`, int64 (lines, LENGTH)."""
    lines = [line.encode()[:LENGTH] for line in file.read_text().splitlines() if line.strip()]
    tokens = np.full((len(lines), LENGTH), PAD, dtype=np.int64)
    for row, line in zip(tokens, lines, strict=True):
        row[: len(line)] = np.frombuffer(line, dtype=np.uint8).astype(np.int64) + FIRST_BYTE
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).astype(np.int64)}


def hide(batch: dict[str, np.ndarray], *, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Hide some tokens; their labels are what they were, and all other labels are ignored."""
    tokens = batch["input_ids"]
    hidden = (rng.random(tokens.shape) < HIDDEN_SHARE) & (tokens != PAD)
    hidden[:, 0] = True  # the first of a line always, so that no batch is without labels
    labels = np.where(hidden, tokens, IGNORED)
    return {**batch, "input_ids": np.where(hidden, MASK, tokens), "labels": labels}


def require_transformers() -> None:
    """End the program with advice where transformers is missing."""
    try:
        import transformers  # noqa: F401  # loaded here, used in make_model
    except ImportError:
        sys.exit("This example needs transformers: pip install transformers")


def make_model(directory: Path | None, width: int) -> Any:
    """The model of a directory that `save_pretrained` wrote, or a new one."""
    import transformers

    if directory is not None:
        return transformers.BertForMaskedLM.from_pretrained(directory, local_files_only=True)
    config = transformers.BertConfig(
        vocab_size=FIRST_BYTE + 256,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
    )
    return transformers.BertForMaskedLM(config)


def train_in_a_loop(
    strategy: rd.Strategy, bert: Any, optimizer: torch.optim.Optimizer, data: rd.Dataset, epochs: int
) -> float:
    """Train by a step of plain PyTorch; return the last epoch's mean loss of a hidden token."""

    def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = batch["labels"]
        optimizer.zero_grad()
        logits = bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        total = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="sum")
        # The mean over the hidden tokens of the global batch: replicas have different numbers of them.
        count = rd.get_replica_context().all_reduce(rd.ReduceOp.SUM, (labels != IGNORED).sum())
        (total / count).backward()
        optimizer.step()
        return total.detach(), (labels != IGNORED).sum()

    loss = float("nan")
    batches = strategy.distribute_dataset(data)
    for epoch in range(epochs):
        results = [strategy.run(step, args=(batch,)) for batch in batches]
        sums = [[float(strategy.reduce(rd.ReduceOp.SUM, part)) for part in result] for result in results]
        loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
        print(f"epoch {epoch + 1}/{epochs}: loss {loss:.4f}")
    return loss


def train_by_fit(bert: Any, optimizer: torch.optim.Optimizer, data: rd.Dataset, epochs: int) -> float:
    """Train with `fit`, which takes the loss from the model's own output; return the last epoch's loss."""
    model = rd.Model(bert)
    model.compile(optimizer, loss="model")
    return float(model.fit(data, epochs=epochs).history["loss"][-1])


def main() -> None:
    parser = make_parser(__doc__, epochs=10, batch_size=32)
    parser.add_argument("--fit", action="store_true", help="train by rd.Model instead of the loop")
    parser.add_argument("--data", type=Path, default=BUILT_IN, help="a text; default: a part of Coriolanus")
    parser.add_argument("--model", type=Path, help="a directory of save_pretrained to begin with")
    parser.add_argument("--save", type=Path, help="a directory for the trained model")
    args = parser.parse_args()
    require_transformers()
    rows = read_lines(args.data)
    if args.smoke:
        rows = {name: values[:80] for name, values in rows.items()}
    epochs = 2 if args.smoke else args.epochs
    data = rd.Dataset.from_tensor_slices(rows).shuffle(2000, seed=0).batch(args.batch_size).map(hide, seed=1)

    with make_strategy(args.strategy, args.replicas, args.consistency) as strategy:
        torch.manual_seed(0)
        with strategy.scope(gradient_reduce_op=None if args.fit else rd.ReduceOp.SUM):
            bert = make_model(args.model, width=32 if args.smoke else 128)
            optimizer = torch.optim.AdamW(bert.parameters(), lr=2e-3)
            if args.fit:
                loss = train_by_fit(bert, optimizer, data, epochs)
        if not args.fit:
            loss = train_in_a_loop(strategy, bert, optimizer, data, epochs)
        print(f"loss of a hidden character: {loss:.4f}")
        if args.save is not None:
            bert.save_pretrained(args.save)
            print(f"saved to {args.save}; load it with BertForMaskedLM.from_pretrained")


if __name__ == "__main__":
    main()
