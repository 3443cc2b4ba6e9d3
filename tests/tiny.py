"""Tiny random checkpoints and adapters, made on the spot by transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: 256 byte tokens, then <s> (256), </s> (257) and <pad> (258); 259 ids in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_llama(
    folder: Path, *, seed: int = 0, tied: bool = False, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """Write a random Llama with loud weights (logits' standard deviation is about 1) and a byte-level tokenizer."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "initializer_range": 0.12,
        **config,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def make_model(folder: Path, config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model of any family, every tensor of it loud, and a byte-level tokenizer.

    transformers starts norms at one and biases at zero; one that is applied in the wrong place, or not at all, would go
    unnoticed.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            # Stacked biases of experts have two dimensions.
            if tensor.dim() < 2 or not tensor.any():
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def make_adapter(base: Path, folder: Path, *, seed: int = 1, scale: float = 0.3, **config: Any) -> Path:
    """Write a PEFT LoRA adapter for `base` whose A, B and saved modules are random and loud, as PEFT saves it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=scale)
            elif "lora_embedding_A" in name:
                # Here it is A that starts as zeros; rows of a table are an order of magnitude quieter than activations.
                parameter.normal_(std=0.2 * scale)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Set (or with None-valued sentinel `...`, delete) keys of a JSON file."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content, indent=2))
