"""Train a language model that no process holds whole: its parameters are divided among the replicas.

The twin of `transformer_torchrun.py`, which is the same in plain PyTorch.

    python examples/transformer_sharded.py --replicas 2
"""

from __future__ import annotations

import torch
from torch import nn
from transformer_common import Block, LanguageModel, load_text, loss_of, make_parser, report

import raydist as rd


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="on each machine")
    parser.add_argument("--checkpoint", help="a directory: saved there after each epoch, and resumed from")
    args = parser.parse_args()
    rows, num_characters = load_text(args.data)
    rows, epochs, width = (rows[:48], 1, 16) if args.smoke else (rows, args.epochs, args.width)

    with rd.ShardedStrategy(args.replicas, policy=Block) as strategy:
        with strategy.scope():
            with torch.device("meta"):  # without memory: the replicas make the values
                model = LanguageModel(num_characters, width)
            rd.materialize(model, seed=0)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = strategy.distribute_dataset(
            rd.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=0).batch(args.batch_size)
        )
        progress = rd.State(epoch=0)

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        manager = None
        if args.checkpoint:
            checkpoint = rd.Checkpoint(model=model, optimizer=optimizer, progress=progress)
            manager = rd.CheckpointManager(checkpoint, args.checkpoint, max_to_keep=2)
            manager.restore_or_initialize()
        while progress.epoch < epochs:
            for batch in batches:
                loss = strategy.run(step, args=(batch,))
            progress.epoch += 1
            report(progress.epoch, epochs, float(strategy.reduce("MEAN", loss, axis=None)))
            if manager is not None:
                manager.save()
        if manager is not None:
            manager.close()


if __name__ == "__main__":
    main()
