# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train four adapters at once
#
# Four adapters, each with data, rank, method and length of its own, are trained over one base in memory. Small
# batches of several jobs share a forward pass: each job is a segment of the packed rows, as requests for different
# adapters are while serving. Nothing else is shared, so each adapter is the one it would have become alone, which is
# checked below.
#
# The base is the small Gemma of the other tutorials, or the checkpoint in `GEMMA`.

# %%
import json
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from small_gemma import DATA, conversations, gemma_folder

from graftlm import LLM, EngineConfig, SamplingParams
from graftlm.training import TrainingJob, train_together

scratch = Path(tempfile.mkdtemp())
gemma = gemma_folder(scratch / "gemma")
base = EngineConfig(model=gemma, dtype="float32")

# %% [markdown]
# ## Four jobs
#
# Three learn from conversations, by LoRA, rsLoRA and DoRA. The fourth learns a taste, from pairs of answers (DPO):
# like a pirate rather than in JSON. From a shell each is a TOML file with these keys: `graft train GEMMA --job
# pirate.toml --job extract.toml --job triage.toml --job taste.toml`.

# %%
taste = scratch / "taste.jsonl"
with taste.open("w") as file:
    for (question, chosen), (_, rejected) in zip(conversations("pirate"), conversations("extract"), strict=True):
        file.write(json.dumps({"prompt": [question], "chosen": [chosen], "rejected": [rejected]}) + "\n")


def jobs(folder):
    shared = {"lr": 5e-3, "batch_size": 4, "max_length": 128, "save_every": 0}
    data = {name: str(DATA / f"{name}.jsonl") for name in ("pirate", "extract", "triage")}
    return [
        TrainingJob(data=data["pirate"], output=str(folder / "pirate"), rank=16, steps=20, **shared),
        TrainingJob(data=data["extract"], output=str(folder / "extract"), rank=8, rslora=True, steps=16, **shared),
        TrainingJob(data=data["triage"], output=str(folder / "triage"), rank=4, dora=True, steps=12, **shared),
        TrainingJob(data=str(taste), output=str(folder / "taste"), objective="dpo", steps=8, **shared),
    ]


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


begun = time.process_time()
together = train_together(base, jobs(scratch / "together"))
seconds_together = time.process_time() - begun
for adapter in together:
    curve = losses(adapter.folder)
    first, last = sum(curve[:4]) / 4, sum(curve[-4:]) / 4
    assert last < first
    print(f"{adapter.name:8} {adapter.step:3} steps, loss of the first four {first:.2f}, of the last four {last:.2f}")

# %%
figure, axes = plt.subplots(figsize=(6, 3), dpi=80, layout="constrained")
for adapter in together:
    curve = losses(adapter.folder)
    axes.plot(range(1, len(curve) + 1), curve, label=adapter.name)
axes.set(xlabel="step", ylabel="loss", title="four jobs, one base")
axes.legend()
axes.grid(alpha=0.3)

# %% [markdown]
# ## As if alone
#
# The same four, one after the other. Every loss of every step agrees.

# %%
begun = time.process_time()
alone = [train_together(base, [job])[0] for job in jobs(scratch / "alone")]
seconds_alone = time.process_time() - begun
for one, other in zip(together, alone, strict=True):
    worst = max(abs(a - b) for a, b in zip(losses(one.folder), losses(other.folder), strict=True))
    assert worst < 1e-4, (one.name, worst)
    print(f"{one.name:8} largest difference of a loss below 1e-4: True")
print(f"processor time: together {seconds_together:.1f} s, one after the other {seconds_alone:.1f} s, loading included")

# %% [markdown]
# ## Serve all four
#
# One batch, five models: each row takes its own adapter, and its answer is what it would be in a batch of its own.
# (From a base made in seconds, the answers have the right form and little sense.)

# %%
adapters = {adapter.name: adapter.folder for adapter in together}
llm = LLM(gemma, dtype="float32", adapters=adapters, kv_cache_bytes=64 << 20, max_model_len=512)
question = [{"role": "user", "content": "My kettle arrived broken."}]
params = SamplingParams(max_tokens=12, temperature=0)
names = [None, *adapters]
mixed = llm.chat([question] * len(names), params, adapter=names)
for name, output in zip(names, mixed, strict=True):
    (single,) = llm.chat(question, params, adapter=name)
    assert single.outputs[0].token_ids == output.outputs[0].token_ids
    print(f"{name or 'base':>8}: {output.outputs[0].text!r}")
llm.shutdown()
