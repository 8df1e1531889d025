"""Train a language model on a mesh of replicas: tensor parallelism within each group, FSDP between the groups.

python examples/transformer_2d.py --mesh 2 2    # four replicas: parameters divided among 2 x 2
torchrun --nproc_per_node 2 examples/transformer_torchrun.py    # FSDP alone, in plain PyTorch
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformer_common import LanguageModel, load_text, loss_of, make_parser, report

import raydist as rd


def parallelize(model: Any, mesh: Any) -> None:
    """Divide the heads and hidden values of each block along "tensor", then all parameters along "shard"."""
    columns, rows = ("queries", "keys", "values", "up"), ("output", "down")
    plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        block.heads //= mesh["tensor"].size()  # those of this replica
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--mesh", type=int, nargs=2, default=[1, 2], help="replicas with different rows, and with the same"
    )
    args = parser.parse_args()
    rows, num_characters = load_text(args.data)
    rows, epochs, width = (rows[:48], 1, 16) if args.smoke else (rows, args.epochs, args.width)

    with rd.MeshStrategy({"shard": args.mesh[0], "tensor": args.mesh[1]}, parallelize) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model = LanguageModel(num_characters, width)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = strategy.distribute_dataset(
            rd.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=0).batch(args.batch_size)
        )

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            rd.clip_grad_norm_(model.parameters(), 1.0)  # torch's function takes no parameters of different meshes
            optimizer.step()
            return loss.detach()

        for epoch in range(epochs):
            for batch in batches:
                loss = strategy.run(step, args=(batch,))
            report(epoch + 1, epochs, float(torch.as_tensor(strategy.reduce("MEAN", loss, axis=None))))


if __name__ == "__main__":
    main()
