"""How fast is a batch of mixed adapters, against transformers and PEFT in the same run?

32 requests of 128 prompt and 64 output tokens on SmolLM2-135M, greedy, end tokens ignored: without adapters, and with
eight adapters of rank 16 on all seven projections, four requests each. PEFT runs its own mixed batch (`adapter_names`).
Every measurement is a fresh process; systems take turns, so a slow minute of the machine hits both. Medians are shown.

    python benchmarks/mixed_adapters.py [--dtype float32|bfloat16] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from graftlm.demo import demo_model

NUM_REQUESTS, PROMPT_LEN, OUTPUT_LEN = 32, 128, 64
NUM_ADAPTERS, RANK = 8, 16
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SYSTEMS = ("graft", "transformers")


def prompts() -> list[list[int]]:
    import torch

    return torch.randint(0, 40_000, (NUM_REQUESTS, PROMPT_LEN), generator=torch.Generator().manual_seed(0)).tolist()


def load_reference(dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = Path(demo_model())
    if model.is_file():
        return AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=getattr(torch, dtype))
    return AutoModelForCausalLM.from_pretrained(str(demo_model()), dtype=getattr(torch, dtype))


def write_adapters(folder: Path) -> None:
    """Eight random adapters with non-zero B, as PEFT saves them."""
    import peft
    import torch

    base = load_reference("float32")
    for index in range(NUM_ADAPTERS):
        torch.manual_seed(index)
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(folder / f"a{index}")
        base = model.unload()


def run_graft(adapters: dict[str, Path], dtype: str) -> float:
    """Seconds for the whole batch."""
    from graftlm import LLM, SamplingParams

    llm = LLM(
        demo_model(),
        dtype=dtype,
        quantization="none",
        adapters=adapters,
        max_model_len=PROMPT_LEN + OUTPUT_LEN,
    )
    names = [list(adapters)[index % len(adapters)] if adapters else None for index in range(NUM_REQUESTS)]
    batch = [{"prompt_token_ids": prompt} for prompt in prompts()]
    llm.generate(batch[:2], SamplingParams(max_tokens=2, temperature=0), adapter=names[:2])
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(batch, params, adapter=names)
    seconds = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == OUTPUT_LEN for output in outputs)
    return seconds


def run_transformers(adapters: dict[str, Path], dtype: str) -> float:
    """Seconds for the whole batch, by `generate`, with PEFT's mixed batch when there are adapters."""
    import peft
    import torch

    model = load_reference(dtype)
    extra: dict[str, Any] = {}
    if adapters:
        names = list(adapters)
        model = peft.PeftModel.from_pretrained(model, str(adapters[names[0]]), adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(str(adapters[name]), adapter_name=name)
        extra["adapter_names"] = [names[index % len(names)] for index in range(NUM_REQUESTS)]
    model.eval()
    token_ids = torch.tensor(prompts())
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(token_ids)
    model.generate(input_ids=token_ids, attention_mask=mask, max_new_tokens=2, **settings, **extra)
    started = time.perf_counter()
    out = model.generate(input_ids=token_ids, attention_mask=mask, max_new_tokens=OUTPUT_LEN, **settings, **extra)
    seconds = time.perf_counter() - started
    assert out.shape == (NUM_REQUESTS, PROMPT_LEN + OUTPUT_LEN)
    return seconds


def measure(system: str, num_adapters: int, dtype: str, folder: Path) -> dict[str, float]:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, "--worker", system, "--adapters", str(num_adapters)]
    command += ["--dtype", dtype, "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ})
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def work(system: str, num_adapters: int, dtype: str, folder: Path) -> None:
    adapters = {f"a{index}": folder / f"a{index}" for index in range(num_adapters)}
    run = run_graft if system == "graft" else run_transformers
    seconds = run(adapters, dtype)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tokens_per_second": NUM_REQUESTS * OUTPUT_LEN / seconds, "peak_bytes": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--adapters", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.adapters, options.dtype, options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_adapters(folder)
        results: dict[tuple[str, int], list[dict[str, float]]] = {}
        for _ in range(options.repeats):
            for num_adapters in (0, NUM_ADAPTERS):
                for system in SYSTEMS:
                    measured = measure(system, num_adapters, options.dtype, folder)
                    results.setdefault((system, num_adapters), []).append(measured)
    report(results, options.dtype, options.repeats)


def report(results: dict[tuple[str, int], list[dict[str, float]]], dtype: str, repeats: int) -> None:
    def median(system: str, num_adapters: int, figure: str) -> float:
        return statistics.median(result[figure] for result in results[system, num_adapters])

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {dtype}, median of {repeats}")
    print(f"{'adapters':>8}  {'system':<14}{'tokens/s':>9}{'ratio':>7}{'peak GB':>9}")
    for num_adapters in (0, NUM_ADAPTERS):
        reference = median("transformers", num_adapters, "tokens_per_second")
        for system in SYSTEMS:
            speed = median(system, num_adapters, "tokens_per_second")
            label = "PEFT mixed" if system == "transformers" and num_adapters else system
            peak = median(system, num_adapters, "peak_bytes") / 1e9
            print(f"{num_adapters:>8}  {label:<14}{speed:>9.1f}{speed / reference:>7.2f}{peak:>9.2f}")


if __name__ == "__main__":
    main()
