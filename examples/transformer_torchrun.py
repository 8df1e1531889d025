"""Train a language model whose parameters are divided among processes, in plain PyTorch.

The twin of `transformer_sharded.py`: compare the two to see what raydist takes over.

    torchrun --nproc_per_node 2 examples/transformer_torchrun.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformer_common import Block, LanguageModel, load_text, loss_of, make_parser, report


def main() -> None:
    args = make_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows, num_characters = load_text(args.data)
    rows, epochs, width = (rows[:48], 1, 16) if args.smoke else (rows, args.epochs, args.width)

    torch.manual_seed(0)
    model = LanguageModel(num_characters, width)
    for part in model.modules():
        if isinstance(part, Block):
            fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        shuffled = torch.randperm(len(rows), generator=order)
        total, count = torch.zeros(()), 0
        # The last rows of an epoch, which do not fill a batch of every process, are left out.
        for indices in shuffled.split(args.batch_size)[: len(rows) // args.batch_size]:
            batch = torch.from_numpy(rows[indices[rank::world_size].numpy()])
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total, count = total + loss.detach(), count + 1
        dist.all_reduce(total)
        if rank == 0:
            report(epoch + 1, epochs, float(total) / count / world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
