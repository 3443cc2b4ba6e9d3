"""How far is each model family from transformers, and its adapters from PEFT?

Every entry of tests/parity/family_cases.py is made as a tiny random model, with an adapter of each kind that the test
suite tries. For each, the largest difference of any logit from the reference (the adapter alone on a fresh base, one
sequence at a time, unpadded, float32) is written down. The page "Model families" is rendered from the file.

    python -m benchmarks.family_parity [--output docs/reference/family_parity.json] [--only bloom falcon_rw …]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tests.parity.family_cases import FAMILY_CASES, FamilyCase
from tests.parity.oracle import World, make_even_adapter, make_world, prompt_of
from tests.tiny import make_model

LENGTHS = (1, 17, 257)


def largest_difference(world: World, name: str | None, adapter: Path | None) -> float:
    """Between the engine's logits and the reference's, over all prompts, positions and tokens."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    return max(
        (world.llm.logits(prompt, adapter=name) - world.oracle.logits(prompt, adapter)).abs().max().item()
        for prompt in prompts
    )


def measure(case: FamilyCase, folder: Path) -> dict[str, Any]:
    config = case.config()
    world = make_world(make_model(folder / "base", config), attention=case.attention)
    adapters = {
        name: make_even_adapter(world.base, folder / name, **settings) for name, settings in case.adapters().items()
    }
    with world.loaded(adapters):
        differences = {name: largest_difference(world, name, path) for name, path in adapters.items()}
    differences["base"] = largest_difference(world, None, None)
    world.llm.shutdown()
    return {
        "model_type": config.model_type,
        "hidden_size": config.get_text_config().hidden_size,
        "num_attention_heads": config.get_text_config().num_attention_heads,
        "differences": {name: float(f"{difference:.2g}") for name, difference in sorted(differences.items())},
    }


def report(cases: Mapping[str, Any]) -> dict[str, Any]:
    versions = {library.__name__: library.__version__ for library in (peft, torch, transformers)}
    return {
        "machine": platform.machine(),
        "versions": versions,
        "prompt_lengths": LENGTHS,
        "tolerance": "1e-5 * (1 + largest logit)",
        "cases": cases,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/reference/family_parity.json"))
    parser.add_argument("--only", nargs="+", choices=FAMILY_CASES, default=list(FAMILY_CASES))
    options = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    cases = {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            cases[name] = measure(FAMILY_CASES[name], Path(folder))
        print(name, cases[name]["differences"])
    options.output.write_text(json.dumps(report(cases), indent=2) + "\n")


if __name__ == "__main__":
    main()
