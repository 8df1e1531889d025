"""Stand-ins for models of transformers and peft.

`test_packaged_models.py` copies this file into a folder for installed packages, and imports it from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["CausalModel", "get_peft_model"]

WORDS, WIDTH = 20, 8

ACT2FN = {"gelu": nn.GELU(), "silu": nn.SiLU()}


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """As transformers' outputs: fields, of which those that are not None are items too."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                self[each.name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __delitem__(self, key: str) -> None:
        raise TypeError("a ModelOutput keeps its entries")


class DynamicCache:
    """Keys and values of earlier tokens."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.layers = list(layers)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = act

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), attn_mask=mask)
        hidden: torch.Tensor = self.norm(x + attended)
        added: torch.Tensor = self.down(ACT2FN[self.act](self.up(hidden)))
        return hidden + added


class CausalModel(nn.Module):
    """As `GPT2LMHeadModel`: tied weights, labels that the model shifts, and a cache among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(WORDS, WIDTH), Block("silu")
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> ModelOutput:
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if attention_mask is not None:
            mask = mask & attention_mask[:, None].bool()
        hidden = self.block(self.embed(input_ids), mask)
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            loss = F.cross_entropy(logits.view(-1, WORDS), shifted.view(-1), ignore_index=-100)
        return ModelOutput(loss, logits, DynamicCache([hidden]))


class LoraLinear(nn.Module):
    """As peft's: a frozen layer, and a product of two small matrices."""

    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, dtype=base_layer.weight.dtype)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, dtype=base_layer.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.lora_B(self.lora_A(x))
        result: torch.Tensor = self.base_layer(x) + 2 * added
        return result


class PeftModel(nn.Module):
    """As peft's: finds in the model that it wraps what it has not itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":  # asked for before it is set
                raise
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def get_peft_model(model: nn.Module, targets: Sequence[str] = ("q_proj", "v_proj"), rank: int = 2) -> PeftModel:
    """Freeze a model, and put adapters in the place of some of its layers."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(parent, name, LoraLinear(child, rank))
    return PeftModel(model)
