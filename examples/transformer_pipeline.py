"""Train a language model in stages: each replica computes some of its layers, and microbatches pass between them.

python examples/transformer_pipeline.py --stages 2 --replicas 1    # a process for each stage of each replica
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformer_common import LanguageModel, load_text, make_parser, report

import raydist as rd


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="pipelines, which get different rows")
    args = parser.parse_args()
    rows, num_characters = load_text(args.data)
    rows, epochs, width = (rows[:48], 1, 16) if args.smoke else (rows, args.epochs, args.width)

    with rd.PipelineStrategy(args.stages, args.replicas) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model = LanguageModel(num_characters, width)  # as for one device
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = strategy.distribute_dataset(
            rd.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=0).batch(args.batch_size)
        )

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = rd.get_replica_context().pipeline_step((batch[:, :-1], batch[:, 1:]), loss_of)
            rd.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        for epoch in range(epochs):
            for batch in batches:
                loss = strategy.run(step, args=(batch,))
            report(epoch + 1, epochs, float(torch.as_tensor(strategy.reduce("MEAN", loss, axis=None))))


if __name__ == "__main__":
    main()
