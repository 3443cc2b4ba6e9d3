"""A model whose answers are written down beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from tests.tiny import write_tokenizer

VOCAB, END = 259, 257


def make_scripted(folder: Path, scripts: Mapping[str, str]) -> dict[str, str]:
    """Write a GPT-2 that says a script to the end, whatever it is asked, from a position on.

    Its layers add nothing, and each position's embedding is that of the token to say there.

    Returns: for each script the prompt, of as many letters as it takes, that it answers.
    """
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    said, prompts = [END], {}
    for name, script in scripts.items():
        prompts[name] = "x" * len(said)
        said[-1:] = [*tokenizer.encode(script, add_special_tokens=False).ids, END, END]
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=len(said) + 256,
        n_embd=272,
        n_layer=1,
        n_head=4,
        bos_token_id=256,
        eos_token_id=END,
        pad_token_id=258,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight[:, :VOCAB] = torch.eye(VOCAB)
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.wpe.weight[range(len(said)), said] = 20.0
    model.save_pretrained(folder)
    return prompts
