"""How fast does an adapter train, and in how much memory; and what do four gain by training together?

speed: LoRA of rank 16 on all linear layers of SmolLM2-135M in float32, on conversations of very different length, the
loss on the assistant's turns, beside transformers and PEFT in the same run. Graft packs the conversations; the other is
the loop that tutorials show: batches padded to their longest row, `model(input_ids, attention_mask, labels)`, AdamW.
Both see the same batches and report the same losses, which is checked. Speed is real tokens per second of processor
time, so that other programs on the machine count for little; memory is the peak beyond what the process has before it
loads the model.

memory: Graft over a base of layers as TinyLlama-1.1B has them, half of the 22, with random weights, in bfloat16 and in
four bits (QLoRA, the head included), one conversation at a time, with what `--gradient-checkpointing` does: layers are
recomputed in the backward pass, and freed tensors go back to the system.

joint: four jobs of one document each on SmolLM2-135M in bfloat16, an update of all four together and of one after the
other, in turns.

    python benchmarks/train.py [--table speed|memory|joint] [--steps 4] [--repeats 3] [--threads 1]

Every system is measured in fresh processes, in turns. Medians are shown; of `joint`, the least time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from graftlm.demo import demo_model

DATA = Path(__file__).parents[1] / "examples" / "demo_adapters" / "data"
RANK, BATCH_SIZE, LR = 16, 4, 1e-3
SYSTEMS = {"speed": ("graft", "peft"), "memory": ("graft-bfloat16", "graft-nf4"), "joint": ("joint",)}
# What of the generated base is TinyLlama's.
WIDE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
NUM_JOBS, TOKENS_PER_JOB = 4, (4, 16, 64, 256)
IGNORED = -100


def write_model(folder: Path) -> None:
    """The demo's model as transformers saves it, so that no system pays for reading GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = Path(demo_model())
    source = {"gguf_file": model.name} if model.is_file() else {}
    path = str(model.parent if source else model)
    read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **source)
    config = type(read.config)(**{**read.config.to_dict(), "quantization_config": None})
    written = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    written.load_state_dict(read.state_dict())
    written.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path, **source).save_pretrained(folder)


def write_wide_model(folder: Path, small: Path) -> None:
    """Few and wide layers, with the tokenizer of `small`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(small)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=11, max_position_embeddings=2048, tie_word_embeddings=True, **WIDE
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data(path: Path, num_rows: int) -> None:
    """Conversations of one to about ten exchanges, log-normally many."""
    rng = random.Random(0)
    exchanges = [json.loads(line)["messages"] for line in (DATA / "pirate.jsonl").read_text().splitlines()]
    rows = []
    for _ in range(num_rows):
        count = min(10, max(1, round(rng.lognormvariate(0.5, 0.9))))
        rows.append({"messages": [message for pair in rng.sample(exchanges, count) for message in pair]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepared(folder: Path, system: str, steps: int) -> tuple[Any, Any]:
    """Graft's base, and the job with its documents."""
    from graftlm.config import EngineConfig
    from graftlm.models.heap import map_large_tensors
    from graftlm.training.job import make_job
    from graftlm.training.training import load_frozen_base, prepare_job

    is_wide = system in SYSTEMS["memory"]
    if is_wide:
        map_large_tensors()
    quantization = "nf4" if system == "graft-nf4" else None
    base = load_frozen_base(EngineConfig(
        model=folder / ("wide" if is_wide else "model"), dtype="float32" if system in SYSTEMS["speed"] else "bfloat16",
        device="cpu", quantization=quantization, quantize_head=quantization is not None,
    ))  # fmt: skip
    job = make_job({
        "data": folder / "rows.jsonl", "output": tempfile.mkdtemp(dir=folder), "rank": RANK, "steps": steps, "lr": LR,
        "schedule": "constant", "batch_size": 1 if is_wide else BATCH_SIZE, "shuffle": False, "save_every": 0,
        "alpha": RANK, "max_length": 2048,
    })  # fmt: skip
    return base, prepare_job(job, base, "base")


def train_graft(folder: Path, system: str, steps: int) -> tuple[list[float], list[float], int]:
    """Losses, processor seconds of each step, and bytes of the weights with what the optimiser keeps."""
    from graftlm.engine.memory import return_free_memory
    from graftlm.training.trainer import Trainer
    from graftlm.training.training import start_run

    base, job = prepared(folder, system, steps)
    run = start_run(job, base, resume=False)
    trainer = Trainer(base.decoder, recompute_layers=system in SYSTEMS["memory"])
    trainer.add(run)
    return_free_memory()
    forget_peak()
    losses, seconds = [], []
    for _ in range(steps):
        begun = time.process_time()
        trainer.step()
        seconds.append(time.process_time() - begun)
        losses.append(run.last_metrics["loss"])
    weights = {layer.slot: layer.weight.num_bytes for layer in base.decoder.linears.values()}
    # A parameter, its gradient and AdamW's two moments.
    state = 4 * sum(parameter.nbytes for parameter in run.trainable.parameters.values())
    return losses, seconds, sum(weights.values()) + base.decoder.head.weight.num_bytes + state


def train_peft(folder: Path, documents: list[dict[str, list[Any]]], steps: int) -> tuple[list[float], list[float]]:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from graftlm.engine.memory import return_free_memory

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    return_free_memory()
    forget_peak()
    losses, seconds = [], []
    for step in range(steps):
        batch = documents[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        begun = time.process_time()
        longest = max(len(document["ids"]) for document in batch)
        token_ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask, labels = torch.zeros_like(token_ids), torch.full_like(token_ids, IGNORED)
        for row, document in enumerate(batch):
            length = len(document["ids"])
            token_ids[row, :length] = torch.tensor(document["ids"])
            mask[row, :length] = 1
            learnt = torch.tensor(document["learnt"])
            labels[row, :length] = torch.where(learnt, token_ids[row, :length], IGNORED)
        loss = model(input_ids=token_ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - begun)
        losses.append(loss.item())
    return losses, seconds


def train_jointly(folder: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """Tokens of each job -> processor seconds of an update of all jobs together, and of one after the other."""
    import dataclasses

    from graftlm.training.document import Document
    from graftlm.training.trainer import Trainer
    from graftlm.training.training import start_run

    base, prepared_job = prepared(folder, "joint", repeats + 1)

    def trainer_of(num_jobs: int, num_tokens: int) -> Trainer:
        # The token after the last row is the last that is learnt.
        ids = tuple(range(100, 101 + num_tokens))
        document = Document(token_ids=ids, learnt=tuple(place > num_tokens // 2 for place in range(num_tokens + 1)))
        trainer = Trainer(base.decoder)
        for _ in range(num_jobs):
            job = dataclasses.replace(prepared_job.job, output=tempfile.mkdtemp(dir=folder), batch_size=1)
            item = dataclasses.replace(prepared_job, job=job, examples=((document,),), held_out=())
            trainer.add(start_run(item, base, resume=False))
        return trainer

    def seconds_of(trainers: list[Trainer]) -> float:
        begun = time.process_time()
        for trainer in trainers:
            trainer.step()
        return time.process_time() - begun

    found = {}
    for num_tokens in TOKENS_PER_JOB:
        ways = ([trainer_of(NUM_JOBS, num_tokens)], [trainer_of(1, num_tokens) for _ in range(NUM_JOBS)])
        rounds = [[seconds_of(trainers) for trainers in ways] for _ in range(repeats + 1)]
        together, apart = (min(times) for times in zip(*rounds[1:], strict=True))
        found[str(num_tokens)] = (together, apart)
    return found


def memory(field: str) -> int:
    """Bytes, by Linux's account of this process: VmRSS now, VmHWM at the most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def forget_peak() -> None:
    """Let the peak begin anew: loading is not training."""
    Path("/proc/self/clear_refs").write_text("5")


def work(system: str, folder: Path, steps: int, threads: int, repeats: int) -> None:
    import torch

    # What both import is no part of what either takes.
    for module in ("peft", "transformers", "graftlm.training.training"):
        importlib.import_module(module)
    torch.set_num_threads(threads)
    before = memory("VmRSS")
    if system == "joint":
        print(json.dumps(train_jointly(folder, repeats)))
        return
    if system == "peft":
        documents = json.loads((folder / "documents.json").read_text())
        losses, seconds, held = *train_peft(folder, documents, steps), 0
    else:
        losses, seconds, held = train_graft(folder, system, steps)
    print(json.dumps({"losses": losses, "seconds": seconds, "peak": memory("VmHWM") - before, "held": held}))


def measure(system: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, "--worker", system, "--folder", str(folder)]
    command += ["--steps", str(arguments.steps), "--threads", str(arguments.threads)]
    command += ["--repeats", str(arguments.repeats)]
    # Weights that were quantised once are read from there by the next process, as a user's are.
    environment = {**os.environ, "GRAFT_CACHE": str(folder / "cache")}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{system}: {result}", file=sys.stderr, flush=True)
    return result


def in_turns(table: str, folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS[table]}
    for _ in range(arguments.repeats):
        for system in SYSTEMS[table]:
            found[system].append(measure(system, folder, arguments))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--table", action="append", choices=list(SYSTEMS), help="what to measure, repeatable; all if none"
    )
    parser.add_argument("--steps", type=int, default=4, help="the first warms up and does not count")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.folder, arguments.steps, arguments.threads, arguments.repeats)
        return
    tables = arguments.table or list(SYSTEMS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        write_data(folder / "rows.jsonl", arguments.steps * BATCH_SIZE)
        print(
            f"{platform.processor() or platform.machine()}, {arguments.threads} thread(s), {arguments.repeats} repeats"
        )
        if "speed" in tables:
            documents = prepared(folder, "graft", 1)[1].documents
            rows = [{"ids": document.token_ids, "learnt": document.learnt} for document in documents]
            (folder / "documents.json").write_text(json.dumps(rows))
            report_speed(in_turns("speed", folder, arguments), [len(document.token_ids) for document in documents])
        if "memory" in tables:
            write_wide_model(folder / "wide", folder / "model")
            report_memory(in_turns("memory", folder, arguments))
        if "joint" in tables:
            report_joint(measure("joint", folder, arguments))


def report_speed(results: dict[str, list[dict[str, Any]]], lengths: list[int]) -> None:
    counted = sum(lengths[BATCH_SIZE:])
    batches = [lengths[start : start + BATCH_SIZE] for start in range(BATCH_SIZE, len(lengths), BATCH_SIZE)]
    padded = sum(BATCH_SIZE * max(batch) for batch in batches)
    print(
        f"\n{len(lengths)} conversations of {min(lengths)} to {max(lengths)} tokens; padded/real {padded / counted:.2f}"
    )
    speed = {
        system: statistics.median(counted / sum(result["seconds"][1:]) for result in found)
        for system, found in results.items()
    }
    peak = {system: statistics.median(result["peak"] for result in found) for system, found in results.items()}
    first = {system: found[0]["losses"][0] for system, found in results.items()}
    assert abs(first["graft"] - first["peft"]) < 1e-3, first
    print("\n| float32 | tokens per processor second | peak memory | first loss |\n| --- | --- | --- | --- |")
    for system in ("peft", "graft"):
        print(f"| {system} | {speed[system]:.1f} | {peak[system] / 2**20:.0f} MiB | {first[system]:.4f} |")
    print(f"| ratio | {speed['graft'] / speed['peft']:.2f} | {peak['graft'] / peak['peft']:.2f} | |")


def report_memory(results: dict[str, list[dict[str, Any]]]) -> None:
    print("\n| wide layers | weights and optimiser | peak memory |\n| --- | --- | --- |")
    held = {system: found[0]["held"] for system, found in results.items()}
    peak = {system: statistics.median(result["peak"] for result in found) for system, found in results.items()}
    for system in SYSTEMS["memory"]:
        print(f"| {system.removeprefix('graft-')} | {held[system] / 2**20:.0f} MiB | {peak[system] / 2**20:.0f} MiB |")
    shares = [values["graft-nf4"] / values["graft-bfloat16"] for values in (held, peak)]
    print(f"| ratio | {shares[0]:.2f} | {shares[1]:.2f} |")
    share = peak["graft-nf4"] / held["graft-bfloat16"]
    print(f"\nThe peak in four bits is {share:.2f} of weights and optimiser in bfloat16.")


def report_joint(found: dict[str, Any]) -> None:
    print(
        f"\n| tokens of each of {NUM_JOBS} jobs | together | one after the other | ratio |\n| --- | --- | --- | --- |"
    )
    for num_tokens, (together, apart) in found.items():
        print(f"| {num_tokens} | {together * 1e3:.0f} ms | {apart * 1e3:.0f} ms | {apart / together:.2f} |")


if __name__ == "__main__":
    main()
