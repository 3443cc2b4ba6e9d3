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
# # Fine-tune Gemma
#
# A LoRA adapter is trained on a frozen Gemma, written as PEFT writes it, and served from the same base. On the way,
# three things are checked that usually have to be believed: that the loss is the one PEFT computes, that packing
# changes nothing, and that what was trained is what is served.
#
# Set `GEMMA` to the folder of a Gemma checkpoint before you start Jupyter. Without one, a Gemma 3 of two layers is
# made on the spot, in some seconds, with Gemma's own tokenizer if it is installed; everything below is the same.

# %%
import json
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import peft
import torch
from small_gemma import DATA, gemma_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from graftlm import LLM, SamplingParams
from graftlm.training import train

scratch = Path(tempfile.mkdtemp())
gemma = gemma_folder(scratch / "gemma")
config = json.loads((gemma / "config.json").read_text())
print(f"{config['model_type']}: {config['num_hidden_layers']} layers of width {config['hidden_size']}")

# %% [markdown]
# ## The data
#
# One conversation per line. The loss is taken on the assistant's turn only, with the token that closes it.

# %%
rows = DATA / "pirate.jsonl"
for message in json.loads(rows.read_text().splitlines()[0])["messages"]:
    print(f"{message['role']:>9}: {message['content']}")

# %% [markdown]
# ## Train
#
# Documents are packed one after the other, without padding. What is not said here has a default: all linear layers, a
# warm-up and then a cosine, no dropout. From a shell it is `graft train GEMMA --data pirate.jsonl --output
# adapters/pirate --batch-size 4 --steps 24 --lr 0.01`.

# %%
trained = train(gemma, data=rows, output=scratch / "pirate", batch_size=4, steps=24, lr=1e-2, dtype="float32")


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


curve = losses(trained.folder)
first, last = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
print(f"loss of the first five steps {first:.1f}, of the last five {last:.1f}")
assert last < 0.9 * first

# %%
figure, axes = plt.subplots(figsize=(6, 3), dpi=80, layout="constrained")
axes.plot(range(1, len(curve) + 1), curve)
axes.set(xlabel="step", ylabel="loss", title="pirate")
axes.grid(alpha=0.3)

# %% [markdown]
# ## The same losses as PEFT
#
# The loop that tutorials show, on the same rows in the same order: an adapter from PEFT, batches padded to their
# longest row, AdamW. Graft starts from the adapter that PEFT has drawn, and in full precision each of twenty losses
# agrees to 1e-5.

# %%
STEPS, BATCH, LR, LENGTH = 20, 2, 1e-3, 256

model = peft.get_peft_model(
    AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32),
    peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
model.save_pretrained(scratch / "start")

same = {"data": rows, "init_adapter": scratch / "start", "lr": LR, "schedule": "constant", "shuffle": False}
same |= {"max_length": LENGTH, "dtype": "float32"}
packed = train(gemma, output=scratch / "packed", batch_size=BATCH, steps=STEPS, **same)

# %%
tokenizer = AutoTokenizer.from_pretrained(gemma)
end_of_turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")


def padded_batch(lines):
    """Token ids, mask and labels, each [rows, longest]."""
    ids, labels = [], []
    for line in lines:
        messages = json.loads(line)["messages"]
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)
        tokens = tokens[: len(tokens) - tokens[::-1].index(end_of_turn)]
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        ids.append(torch.tensor(tokens))
        labels.append(torch.tensor([-100] * len(prompt) + tokens[len(prompt) :]))
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in ids], batch_first=True)
    return pad(ids, batch_first=True), mask, pad(labels, batch_first=True, padding_value=-100)


def padded_loop(model, data, steps, batch):
    """The losses of PEFT's model."""
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0)
    lines = data.read_text().splitlines()
    found = []
    for step in range(steps):
        ids, mask, labels = padded_batch(lines[step * batch : (step + 1) * batch])
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


expected = padded_loop(model, rows, STEPS, BATCH)
worst = max(abs(ours - theirs) for ours, theirs in zip(losses(packed.folder), expected, strict=True))
print(f"{STEPS} steps, largest difference below 1e-5: {worst < 1e-5}")
assert worst < 1e-5

# %% [markdown]
# In bfloat16 no two programs round alike. The losses of twenty steps are within two in a hundred of each other on
# average.

# %%
short = DATA / "triage.jsonl"
half = train(gemma, output=scratch / "half", batch_size=2, steps=20, **{**same, "data": short, "dtype": "bfloat16"})
model = peft.PeftModel.from_pretrained(
    AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.bfloat16), scratch / "start", is_trainable=True
)
ours, theirs = (sum(curve) / 20 for curve in (losses(half.folder), padded_loop(model, short, 20, 2)))
print(f"loss of twenty steps within 2 %: {abs(ours - theirs) < 0.02 * theirs}")
assert abs(ours - theirs) < 0.02 * theirs

# %% [markdown]
# ## Packed, or one by one
#
# `batch_size=1, accumulate=2` computes each document in a pass of its own. The update is the same: its loss is one
# mean over all tokens of both, not a mean of two means.

# %%
one_by_one = train(gemma, output=scratch / "one-by-one", batch_size=1, accumulate=BATCH, steps=8, **same)
worst = max(abs(a - b) / b for a, b in zip(losses(packed.folder), losses(one_by_one.folder), strict=False))
print(f"largest difference below 1e-6 of the loss: {worst < 1e-6}")
assert worst < 1e-6

# %% [markdown]
# ## Serve it, in this process
#
# The adapter is a folder that PEFT loads too. One batch asks the base and the adapter, and PEFT's logits are those
# that Graft computes. (A model made in seconds picks up the manner, not the language.)

# %%
question = [{"role": "user", "content": "My order has not arrived."}]
llm = LLM(gemma, dtype="float32", adapters={"pirate": trained.folder}, kv_cache_bytes=64 << 20, max_model_len=512)
params = SamplingParams(max_tokens=16, temperature=0)
for name, output in zip([None, "pirate"], llm.chat([question] * 2, params, adapter=[None, "pirate"]), strict=True):
    print(f"{name or 'base':>6}: {output.outputs[0].text!r}")

ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
plain = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
with torch.inference_mode():
    reference = peft.PeftModel.from_pretrained(plain, trained.folder)(torch.tensor([ids])).logits[0]
difference = (llm.logits(ids, adapter="pirate") - reference).abs().max()
llm.shutdown()
print(f"logits as PEFT's: {bool(difference <= 1e-4 * (1 + reference.abs().max()))}")
assert difference <= 1e-4 * (1 + reference.abs().max())

# %% [markdown]
# ## A base in fewer bits
#
# `quantization="nf4"` freezes the base in four bits (QLoRA), `"int8"` in eight; `dtype="bfloat16"` holds what is not
# quantised in sixteen. The adapter's own weights are float32 always. The loss is to be compared down the column: each
# step has other rows. Times are of the machine this ran on, loading included; a small model gains nothing.

# %%
print("base      loss of step 1   of step 2   ms per step   tokens per second")
tokens = int(padded_batch(rows.read_text().splitlines()[: 2 * BATCH])[1].sum())
for label, options in {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "nf4": {"dtype": "bfloat16", "quantization": "nf4"},
}.items():
    begun = time.perf_counter()
    job = train(gemma, **{**same, **options}, output=scratch / label, batch_size=BATCH, steps=2)
    seconds = time.perf_counter() - begun
    found = losses(job.folder)
    assert abs(found[0] - expected[0]) < 0.05 * expected[0]
    print(f"{label:8} {found[0]:>15.2f} {found[-1]:>11.2f} {500 * seconds:>13.0f} {tokens / seconds:>19.0f}")
