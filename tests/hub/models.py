"""Tiny models of transformers and peft with random weights, in float64 and without dropout."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from torch.nn import functional as F

from tests.hub.harness import ROWS, Case, Tensors

WORDS = 50
LENGTH = 7
CLASSES = 3
FLOAT32_NORMS = 1e-6
"""The tolerance for models with norms that always compute in float32: `LlamaRMSNorm`, `T5LayerNorm`."""


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(1))


def labels(num: int = CLASSES) -> torch.Tensor:
    return torch.randint(0, num, (ROWS,), generator=torch.Generator().manual_seed(2))


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padding_mask(length: int = LENGTH) -> torch.Tensor:
    return (torch.arange(length) < 3 + torch.arange(ROWS)[:, None] % 5).long()


def own_loss(model: Any, batch: Tensors) -> torch.Tensor:
    """The model's own loss, from the labels in the batch."""
    return model(**batch).loss


def next_token_loss(model: Any, batch: Tensors) -> torch.Tensor:
    """The loss of a causal model in float64: transformers computes its own in float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:])


def decoded_loss(model: Any, batch: Tensors) -> torch.Tensor:
    """The loss of an encoder and a decoder; the labels are what the decoder shall write."""
    return F.cross_entropy(model(**batch, use_cache=False).logits.transpose(1, 2), batch["labels"])


TEXT: dict[str, Any] = {"input_ids": tokens(), "attention_mask": padding_mask()}
CLASSIFIED: dict[str, Any] = {**TEXT, "labels": labels()}


SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}


def bert() -> Any:
    config = transformers.BertConfig(
        **SIZES,
        vocab_size=WORDS,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return transformers.BertForSequenceClassification(config).double()


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config).double()


def checkpointed_gpt2(reentrant: bool) -> Any:
    """A GPT-2 that keeps no activations."""
    model = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def llama() -> Any:
    config = transformers.LlamaConfig(
        **SIZES,
        vocab_size=WORDS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).double()


def adapted() -> Any:
    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).double()


TRANSFORMERS = {
    "BERT": Case(bert, CLASSIFIED, own_loss),
    "GPT-2": Case(gpt2, TEXT, next_token_loss),
    "Llama": Case(llama, TEXT, next_token_loss, FLOAT32_NORMS),
    "LoRA": Case(adapted, TEXT, next_token_loss, FLOAT32_NORMS),
    "T5": Case(t5, {**TEXT, "labels": tokens(5)}, decoded_loss, FLOAT32_NORMS),
}
