"""What do the parts of the adapter algebra cost that a batch does not use?

32 requests of 128 prompt and 64 output tokens on SmolLM2-135M, greedy, end tokens ignored, with eight plain LoRAs of
rank 16 on all seven projections, four requests each. The same batch runs with nothing else loaded and with adapters of
all other kinds of part loaded beside them: output scales (DoRA), input scales (IA3), rotations (OFT), replaced norms
and matrices, token rows, a larger vocabulary, a dormant half (aLoRA), and virtual tokens. The two take turns in one
process, so a slow minute of the machine hits both; each pair's order is the other way round than the last's.

    python benchmarks/unused_parts.py [--dtype float32|bfloat16] [--repeats 5]

Exits with 1 when the median of the pairs' ratios is below 0.97.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import torch
from subject import NUM_REQUESTS, OUTPUT_LEN, PROJECTIONS, PROMPT_LEN, load_reference, prompts, write_adapters

from graftlm import LLM, SamplingParams
from graftlm.demo import demo_model

ALLOWED = 0.97
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
OTHERS: dict[str, peft.PeftConfig] = {
    "dora": peft.LoraConfig(**{**LORA, "target_modules": PROJECTIONS}, use_dora=True, task_type="CAUSAL_LM"),
    "ia3": peft.IA3Config(task_type="CAUSAL_LM"),
    "oft": peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=16, target_modules=["q_proj", "v_proj"]),
    "norms": peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "saved": peft.LoraConfig(**LORA, modules_to_save=["layers.0.mlp.up_proj"], task_type="CAUSAL_LM"),
    "rows": peft.LoraConfig(**LORA, trainable_token_indices=[5, 9, 200], task_type="CAUSAL_LM"),
    "invoked": peft.LoraConfig(**LORA, alora_invocation_tokens=[17, 18], task_type="CAUSAL_LM"),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
}


def write_others(folder: Path) -> dict[str, Path]:
    """One adapter of every other kind, as PEFT saves it, and one with a larger vocabulary."""
    base = load_reference("float32")
    for name, config in OTHERS.items():
        torch.manual_seed(0)
        peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(folder / name, save_embedding_layers=False)
    base.resize_token_embeddings(base.config.vocab_size + 8, mean_resizing=False)
    grown = peft.LoraConfig(**LORA, task_type="CAUSAL_LM")
    peft.get_peft_model(base, grown).save_pretrained(folder / "grown", save_embedding_layers=True)
    return {name: folder / name for name in (*OTHERS, "grown")}


def tokens_per_second(llm: LLM, adapters: list[str]) -> float:
    """Of the whole batch, prompts included in its time."""
    names: list[Any] = [adapters[index % len(adapters)] for index in range(NUM_REQUESTS)]
    batch: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts()]
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(batch, params, adapter=names)
    return NUM_REQUESTS * OUTPUT_LEN / (time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_adapters(folder)
        plain = {path.name: path for path in sorted(folder.iterdir())}
        others = write_others(folder)
        llm = LLM(
            demo_model(),
            dtype=options.dtype,
            adapters=plain,
            max_model_len=PROMPT_LEN + OUTPUT_LEN,
            prefix_cache=False,
        )
        alone: list[float] = []
        beside: list[float] = []
        tokens_per_second(llm, list(plain))
        for repeat in range(options.repeats):
            for is_alone in (True, False) if repeat % 2 else (False, True):
                for other, path in {} if is_alone else others.items():
                    llm.load_adapter(other, path)
                (alone if is_alone else beside).append(tokens_per_second(llm, list(plain)))
                for other in () if is_alone else others:
                    llm.unload_adapter(other)
        llm.shutdown()
    ratios = [with_others / without for with_others, without in zip(beside, alone, strict=True)]
    ratio = statistics.median(ratios)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.dtype}, {len(ratios)} pairs")
    print(f"plain LoRAs alone                    {statistics.median(alone):8.1f} tokens/s")
    print(f"beside {len(others)} adapters of other kinds      {statistics.median(beside):8.1f} tokens/s")
    print(f"ratio {ratio:.3f} (from {min(ratios):.3f} to {max(ratios):.3f}), {ALLOWED} allowed")
    return 0 if ratio >= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
