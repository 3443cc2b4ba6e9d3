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
# # Generate with Gemma
#
# One workload, computed in twelve ways, from transformers' padded batch to four adapters mixed in one. No row prints a
# time before its answers are checked: in full precision they have to be the tokens that transformers computes for
# each prompt alone; in four or eight bits, the logits must be no farther from full precision than those of
# bitsandbytes.
#
# Set `GEMMA` to the folder of a Gemma checkpoint to see it for a model of some size. Without one, a Gemma 3 of two
# layers is made on the spot, with Gemma's own tokenizer if it is installed: with so little to compute, its times are
# mostly the output head, a row for each of its 262 145 tokens, and the bookkeeping of each step.

# %%
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import peft
import torch
from safetensors.torch import save_file
from small_gemma import conversations, gemma_folder
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from graftlm import LLM, SamplingParams

REPEATS = 3
scratch = Path(tempfile.mkdtemp())
gemma = gemma_folder(scratch / "gemma")
tokenizer = AutoTokenizer.from_pretrained(gemma)
print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s) of {os.cpu_count()} processors")

# %% [markdown]
# ## The workload
#
# Eight conversations that begin with the same instructions. Questions and answers have lengths as they come in
# practice: log-normal, most of them short, a few long. An answer ends at its length or at the model's end of turn.

# %%
rng = random.Random(0)
pool = [messages[0]["content"] for messages in conversations("extract")]
instructions = "You answer messages to a shop. Here are some. " + " ".join(pool[:6])
prompts, lengths = [], []
for _ in range(8):
    count = min(8, max(1, round(rng.lognormvariate(0.3, 0.8))))
    text = f"{instructions}\n\n{' '.join(rng.sample(pool, count))}"
    chat = [{"role": "user", "content": text}]
    prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    lengths.append(min(32, max(2, round(rng.lognormvariate(2.3, 0.8)))))
print("prompt tokens:", sorted(len(prompt) for prompt in prompts))
print("answer tokens, at most:", sorted(lengths))

# %% [markdown]
# ## What is right
#
# transformers, one prompt at a time: no padding that anything could depend on.

# %%
torch.set_grad_enabled(False)


def alone(model):
    """Each prompt's answer, computed by itself."""
    return [answer_of(model, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def answer_of(model, prompt, length):
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return without_end(output[0, len(prompt) :].tolist())


def without_end(tokens):
    """Up to the end token: what follows it is padding."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0]] if places else tokens


model = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
ends = model.generation_config.eos_token_id
ends = ends if isinstance(ends, list) else [ends]
expected = alone(model)
total = sum(len(answer) for answer in expected)
print(f"{total} tokens in {len(expected)} answers")

# %% [markdown]
# Speed is counted in tokens of these answers: padding, and what is computed beyond an answer's end, count for
# nothing.

# %%
ladder = {}


def measure(label, compute, reference):
    """Check once, which warms up too; then the median of three."""
    assert compute() == reference, f"{label}: other tokens"
    add(label, compute)


def add(label, compute):
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - begun)
    ladder[label] = total / statistics.median(seconds)
    print(f"{label:34} {ladder[label]:7.0f} tokens/s")


def padded(model, **options):
    """One batch: prompts filled up on the left, and as many steps as the longest answer takes."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=False, **options)
    return [without_end(row[:length]) for row, length in zip(output[:, width:].tolist(), lengths, strict=True)]


measure("transformers, padded batch", lambda: padded(model), expected)

# %% [markdown]
# transformers can batch continuously too: requests join and leave a running batch, over a paged cache. It is made for
# GPUs and its own attention kernels; on a processor each step attends through a mask over the whole cache, which is
# therefore kept small here. It has one set of weights for all requests, so that the last part of this page has no such
# row.

# %%
small_cache = ContinuousBatchingConfig(page_size=64, num_blocks=64, max_batch_tokens=256, max_memory_percent=0.5)


def continuous(model):
    """Every request stops at its own length."""
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=ends),
        continuous_batching_config=small_cache,
    ) as manager:
        names = [manager.add_request(prompt, max_new_tokens=n) for prompt, n in zip(prompts, lengths, strict=True)]
        found = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=60)
            if result.is_finished():
                found[result.request_id] = without_end(result.generated_tokens)
    return [found[name] for name in names]


measure("transformers, continuous batching", lambda: continuous(model), expected)

# %% [markdown]
# ## Graft, a step at a time
#
# * *one by one* leaves out padding and batches alike;
# * *padded* lets every row go on for as many steps as the longest answer takes, as a static batch does;
# * *ragged* packs all sequences without padding; each holds one block of cache as long as the context, as a static
#   cache would;
# * *paged* gives out blocks of 16 tokens as they are needed: the same answers from less memory;
# * with the *prefix cache*, the instructions are computed once.

# %%
params = [SamplingParams(max_tokens=length, temperature=0) for length in lengths]
requests = [{"prompt_token_ids": prompt} for prompt in prompts]
context = 1024


def engine(**options):
    given = {"dtype": "float32", "max_model_len": context, "prefix_cache": False, "max_num_batched_tokens": 1024}
    return LLM(**{"model": gemma, **given, "kv_cache_bytes": 256 << 20, **options})


def answers(llm, adapter=None):
    outputs = llm.generate(requests, params, adapter=adapter)
    return [without_end(list(output.outputs[0].token_ids)) for output in outputs]


def padded_answers(llm):
    longest = SamplingParams(max_tokens=max(lengths), temperature=0, ignore_eos=True)
    outputs = llm.generate(requests, longest)
    return [
        without_end(list(output.outputs[0].token_ids)[:length]) for output, length in zip(outputs, lengths, strict=True)
    ]


for label, options, compute in (
    ("Graft, one by one", {"max_num_seqs": 1}, answers),
    ("Graft, padded batch", {"block_size": context}, padded_answers),
    ("Graft, ragged batch", {"block_size": context}, answers),
    ("  + paged", {}, answers),
    ("  + prefix cache", {"prefix_cache": True}, answers),
):
    llm = engine(**options)
    measure(label, lambda llm=llm, compute=compute: compute(llm), expected)
    llm.shutdown()

held = sum(-(-(len(prompt) + len(answer)) // 16) * 16 for prompt, answer in zip(prompts, expected, strict=True))
print(f"cache held: {len(prompts) * context} tokens in blocks of {context}, {held} in blocks of 16")

# %% [markdown]
# ## Fewer bits
#
# Quantised weights give other logits, and the question is how far off they are. The measure is bitsandbytes under
# transformers: relative distance from full precision at most 1.25 times as large (and 0.001), and so with the
# Kullback-Leibler divergence (and 0.0001); the likeliest token must agree as often, within one in a hundred.

# %%
text = [token for prompt in prompts for token in prompt][:256]
full = model(torch.tensor([text])).logits[0]


def distances(logits):
    relative = float((logits - full).norm() / full.norm())
    target = functional.log_softmax(full, -1)
    divergence = float(
        functional.kl_div(functional.log_softmax(logits, -1), target, reduction="none", log_target=True).sum(-1).mean()
    )
    return relative, divergence, float((logits.argmax(-1) == full.argmax(-1)).float().mean())


for quantization, settings in {
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
}.items():
    other = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32, quantization_config=settings)
    allowed = distances(other(torch.tensor([text])).logits[0].float())
    llm = engine(prefix_cache=True, quantization=quantization)
    found = distances(llm.logits(text))
    assert found[0] <= 1.25 * allowed[0] + 1e-3, (found, allowed)
    assert found[1] <= 1.25 * allowed[1] + 1e-4, (found, allowed)
    assert found[2] >= allowed[2] - 0.01, (found, allowed)
    print(f"{quantization}: divergence {found[1]:.4f}, of bitsandbytes {allowed[1]:.4f}")
    answers(llm)
    add(f"  + {quantization}", lambda llm=llm: answers(llm))
    llm.shutdown()

# %% [markdown]
# A checkpoint in eight-bit floats is another base, not an approximation of this one while it runs: transformers makes
# full matrices of it where there is no GPU, and Graft's tokens over it have to be the same.

# %%
config = json.loads((gemma / "config.json").read_text())


def write_fp8(folder, block=32):
    """The layers' matrices as eight-bit floats, with a scale for each square of them; the rest as it is."""
    shutil.copytree(gemma, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            squares = tensor.unflatten(1, (-1, block)).unflatten(0, (-1, block))
            scale = squares.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            tensor = (squares / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
        if name != "lm_head.weight":
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


eight_bit_floats = write_fp8(scratch / "fp8")
other = AutoModelForCausalLM.from_pretrained(eight_bit_floats, dtype=torch.float32)
answered = alone(other)
total = sum(len(answer) for answer in answered)
llm = engine(model=eight_bit_floats, prefix_cache=True)
measure("  + fp8", lambda: answers(llm), answered)
llm.shutdown()

# %% [markdown]
# ## Four adapters in one batch
#
# Each prompt asks for one of four adapters or for the base. PEFT mixes them by `adapter_names`; what is right is PEFT
# with one adapter active, a prompt at a time.

# %%
names = ["a", "b", "c", "d"]
for seed, name in enumerate(names):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    fresh = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32)
    peft.get_peft_model(fresh, config).save_pretrained(scratch / name)

chosen = [([*names, None])[index % 5] for index in range(len(prompts))]
several = peft.PeftModel.from_pretrained(model, scratch / "a", adapter_name="a")
for name in names[1:]:
    several.load_adapter(scratch / name, adapter_name=name)
mixed = list(expected)
for index, name in enumerate(chosen):
    if name is not None:
        several.set_adapter(name)
        mixed[index] = answer_of(several, prompts[index], lengths[index])
assert mixed != expected
total = sum(len(answer) for answer in mixed)

spelled = ["__base__" if name is None else name for name in chosen]
measure("PEFT, 4 adapters, padded", lambda: padded(several.eval(), adapter_names=spelled), mixed)
llm = engine(prefix_cache=True, adapters={name: scratch / name for name in names})
measure("Graft, 4 adapters mixed", lambda: answers(llm, chosen), mixed)
llm.shutdown()

# %%
figure, axes = plt.subplots(figsize=(7, 3.6), dpi=80, layout="constrained")
labels = list(ladder)
colours = ["tab:gray" if label.startswith(("transformers", "PEFT")) else "tab:blue" for label in labels]
axes.barh(labels, list(ladder.values()), color=colours)
axes.invert_yaxis()
axes.set(xlabel="tokens per second, of answers")
axes.grid(alpha=0.3, axis="x")
