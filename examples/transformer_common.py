"""A small language model of characters, and its data: for the examples that divide it among replicas."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

BUILT_IN = Path(__file__).parent / "data" / "shakespeare.txt"
LENGTH = 32


class Block(nn.Module):
    """One layer: attention to earlier characters, and a multi-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return hidden


class LanguageModel(nn.Module):
    """Logits of the next character at each place: int64 (rows, length) -> float (rows, length, characters)."""

    def __init__(self, num_characters: int, width: int = 128, num_layers: int = 4) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(num_characters, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(num_layers))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, num_characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.characters(characters) + self.places(torch.arange(characters.shape[1], device=characters.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.logits(self.norm(x))
        return logits


def load_text(path: Path) -> tuple[np.ndarray, int]:
    """Passages of a text as numbers of characters, int64 (n, LENGTH + 1), and the number of different characters."""
    text = path.read_text()
    alphabet = sorted(set(text))
    numbers = np.searchsorted(np.array(alphabet), np.array(list(text)))
    starts = range(0, len(numbers) - LENGTH, LENGTH)
    return np.stack([numbers[at : at + LENGTH + 1] for at in starts]), len(alphabet)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=BUILT_IN, help="a text; default: a part of Coriolanus")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a batch of all replicas together")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    return parser


def report(epoch: int, epochs: int, loss: float) -> None:
    print(f"epoch {epoch}/{epochs}: {loss / math.log(2):.3f} bits per character")
