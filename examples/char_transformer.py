"""Learn to write, a character at a time: a small transformer that saves, resumes and shows its curves and samples.

python examples/char_transformer.py --strategy one_device --checkpoint run --tensorboard run/logs
python examples/char_transformer.py --strategy mirrored --checkpoint run      # goes on where the other one was stopped
tensorboard --logdir run/logs
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from chosen_strategy import make_strategy
from training_loop import make_parser

BUILT_IN = Path(__file__).parent / "data" / "shakespeare.txt"
LENGTH = 64
ACCUMULATE = 2  # batches for each step of the optimizer


class Writer(nn.Module):
    """What comes after each character: logits (rows, length, characters)."""

    def __init__(self, num_characters: int, width: int = 128, num_layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, num_characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        length = characters.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, device=characters.device)
        hidden = self.characters(characters) + self.places[:length]
        logits: torch.Tensor = self.output(self.layers(hidden, mask=later, is_causal=True))
        return logits

    @torch.no_grad()
    def go_on(self, begin: Sequence[int], count: int) -> list[int]:
        """So many characters more: always the likeliest."""
        self.eval()
        written = list(begin)
        for _ in range(count):
            written.append(int(self(torch.tensor(written[-LENGTH:])[None])[0, -1].argmax()))
        self.train()
        return written


def passages(text: str, alphabet: Sequence[str]) -> np.ndarray:
    """Numbers of characters, int64 (n, LENGTH + 1): each passage begins with the last character of the one before."""
    numbers = np.searchsorted(np.array(alphabet), np.array(list(text)))
    return np.stack([numbers[at : at + LENGTH + 1] for at in range(0, len(numbers) - LENGTH, LENGTH)])


class Training:
    """The writer, and all that steers its training; made in the scope."""

    def __init__(self, num_characters: int, width: int, num_updates: int) -> None:
        self.writer = Writer(num_characters, width)
        self.optimizer = torch.optim.AdamW(self.writer.parameters(), lr=2e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=max(1, num_updates))
        self.num_steps = rd.get_global_step()

    def step(self, batch: torch.Tensor, updates: bool) -> torch.Tensor:
        """Adds to the gradients; with the last of several batches the optimizer steps. On every replica."""
        device = torch.device(rd.get_replica_context().device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = self.writer(batch[:, :-1])
        loss = F.cross_entropy(logits.float().transpose(1, 2), batch[:, 1:])
        (loss / ACCUMULATE).backward()
        if updates:
            nn.utils.clip_grad_norm_(self.writer.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.num_steps.add_(1)
        rd.summary.scalar("loss", loss)  # the mean over all replicas' rows
        return loss.detach()


def main() -> None:
    parser = make_parser(__doc__, epochs=10, batch_size=16)
    parser.add_argument("--data", type=Path, default=BUILT_IN, help="a text; default: a part of Coriolanus")
    parser.add_argument("--checkpoint", help="where to save, and to go on from: a directory, or a URI such as s3://...")
    parser.add_argument("--tensorboard", help="a directory for curves and samples")
    args = parser.parse_args()
    text = args.data.read_text()
    alphabet = sorted(set(text))
    rows = passages(text, alphabet)[: 64 if args.smoke else None]
    epochs = 2 if args.smoke else args.epochs
    num_updates = epochs * math.ceil(len(rows) / args.batch_size) // ACCUMULATE

    with make_strategy(args.strategy, args.replicas, args.consistency) as strategy, contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        with strategy.scope():
            training = Training(len(alphabet), 16 if args.smoke else 128, num_updates)
        dataset = rd.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=0).batch(args.batch_size)
        batches = strategy.distribute_dataset(dataset)
        progress = rd.State(epoch=0, batches=0, loss=0.0)
        checkpoint = rd.Checkpoint(
            writer=training.writer,
            optimizer=training.optimizer,
            schedule=training.schedule,
            data=batches,
            progress=progress,
            gradients=True,  # a run may stop between two steps of the optimizer: what was added up so far is saved too
        )
        directory = args.checkpoint or tempfile.mkdtemp(prefix="char-transformer-")
        manager = rd.CheckpointManager(checkpoint, directory, max_to_keep=2, checkpoint_interval=50)
        stack.callback(manager.close)
        found = manager.restore_or_initialize()
        print(f"goes on from {found}" if found else f"begins anew, and saves to {directory}")
        if args.tensorboard is not None:
            events = stack.enter_context(rd.summary.create_file_writer(args.tensorboard))
            stack.enter_context(events.as_default())

        loss = None
        while progress.epoch < epochs:
            for batch in batches:  # after a restart: the rest of the epoch
                progress.batches += 1
                updates = progress.batches % ACCUMULATE == 0
                loss = strategy.run(training.step, args=(batch, updates))
                if updates:
                    training.schedule.step()
                manager.save()  # every 50th call
            progress.epoch += 1
            if loss is not None:  # nothing may have been left of the epoch
                progress.loss = float(torch.as_tensor(strategy.reduce(rd.ReduceOp.MEAN, loss)))
            sample = training.writer.go_on(rows[0, :20].tolist(), 20 if args.smoke else 200)
            rd.summary.text("sample", "".join(alphabet[number] for number in sample))
            rd.summary.scalar("learning_rate", training.schedule.get_last_lr()[0])
            manager.save(check_interval=False)
            print(f"epoch {progress.epoch}/{epochs}: loss {progress.loss:.4f}")
        print(f"bits per character: {progress.loss / math.log(2):.3f} (by chance {math.log2(len(alphabet)):.3f})")
        print("".join(alphabet[number] for number in training.writer.go_on(rows[0, :20].tolist(), 60)))


if __name__ == "__main__":
    main()
