"""Learn to write like Shakespeare, a character at a time: an LSTM whose slowest worker holds nobody up.

python examples/char_lstm.py                              # parameter servers, SyncWithBackups(1)
python examples/char_lstm.py --strategy mirrored          # every step waits for all replicas
python examples/char_lstm.py --data tinyshakespeare.txt --epochs 3
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from chosen_strategy import make_strategy
from training_loop import make_parser, total, train

BUILT_IN = Path(__file__).parent / "data" / "shakespeare.txt"
LENGTH = 64


class Writer(nn.Module):
    """What comes after each character: logits (rows, length, characters)."""

    def __init__(self, num_characters: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.output = nn.Linear(width, num_characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(characters))
        logits: torch.Tensor = self.output(hidden)
        return logits

    @torch.no_grad()
    def go_on(self, begin: Sequence[int], count: int) -> list[int]:
        """So many characters more, drawn."""
        written = list(begin)
        for _ in range(count):
            logits = self(torch.tensor(written[-LENGTH:])[None])[0, -1]
            written.append(int(torch.multinomial(logits.softmax(0), 1)))
        return written


def passages(text: str, alphabet: Sequence[str]) -> np.ndarray:
    """Numbers of characters, int64 (n, LENGTH + 1): each passage begins with the last character of the one before."""
    numbers = np.searchsorted(np.array(alphabet), np.array(list(text)))
    return np.stack([numbers[at : at + LENGTH + 1] for at in range(0, len(numbers) - LENGTH, LENGTH)])


def loss_of(writer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean over all characters."""
    return F.cross_entropy(writer(rows[:, :-1]).transpose(1, 2), rows[:, 1:])


def main() -> None:
    parser = make_parser(__doc__, epochs=20, batch_size=16)
    parser.add_argument("--data", type=Path, default=BUILT_IN, help="a text; default: a part of Coriolanus")
    parser.set_defaults(strategy="parameter_server", consistency="backups")
    args = parser.parse_args()
    text = args.data.read_text()
    alphabet = sorted(set(text))
    rows = passages(text, alphabet)[: 200 if args.smoke else None]
    held_out, rows = rows[::10], np.delete(rows, slice(None, None, 10), axis=0)

    with make_strategy(args.strategy, args.replicas, args.consistency) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            writer = Writer(len(alphabet), 16 if args.smoke else 128)
            optimizer = torch.optim.Adam(writer.parameters(), lr=3e-3)

        def train_step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(writer, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(writer.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        def test_step(batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return loss_of(writer, batch) * len(batch)

        shuffled = rd.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=0)
        batches = strategy.distribute_dataset(shuffled.batch(args.batch_size))
        test_batches = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(held_out).batch(args.batch_size))
        train(strategy, train_step, batches, 1 if args.smoke else args.epochs)
        nats = total(strategy, test_step, test_batches) / len(held_out)
        print(f"bits per character: {nats / np.log(2):.3f} (by chance {np.log2(len(alphabet)):.3f})")
        sample = writer.go_on(rows[0, :20].tolist(), 20 if args.smoke else 200)
        print("".join(alphabet[number] for number in sample))


if __name__ == "__main__":
    main()
