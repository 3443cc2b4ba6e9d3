"""One measurement of one system, in a process of its own; `vs_peers.py` starts it.

    python benchmarks/peers.py JOB.json

Prints one line of JSON. Each system is told the same prompts and answers all of them greedily with the same number of
tokens, end tokens ignored. What it needs is imported by its own function only, so that a system may live in a Python of
its own, without Graft.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of the batch that is not counted.
WARM_UP_REQUESTS, WARM_UP_TOKENS = 2, 4

Job = dict[str, Any]
Generate = Callable[[list[list[int]], int], int]


def measure_graft(job: Job) -> dict[str, Any]:
    from graftlm.config import AdapterDType, EngineConfig
    from graftlm.engine.engine import Engine
    from graftlm.workload import Workload, measure_workloads

    # vLLM keeps adapters in the model's dtype; PEFT computes with them in float32.
    adapter_dtype: AdapterDType = "bfloat16" if job["dtype"] == "bfloat16" else "auto"
    config = EngineConfig(
        model=job["model"],
        adapters=job["adapters"],
        adapter_dtype=adapter_dtype,
        dtype=job["dtype"],
        quantization=job.get("quantization"),
        quantization_cache=False,
        prefix_cache=False,
    )
    engine = Engine(config)
    workloads = [
        Workload(
            num_requests=size,
            prompt_tokens=len(job["prompts"][0]),
            output_tokens=job["output_tokens"],
            adapters=tuple(job["adapters"]),
        )
        for size in job["batch_sizes"]
    ]
    measured = measure_workloads(engine, workloads, repeats=1)
    engine.close()
    return {
        "tokens_per_second": {
            each.workload.num_requests: each.medians.output_tokens_per_second for each in measured.workloads
        },
        "bandwidth_share": {
            each.workload.num_requests: each.medians.decode_bandwidth_share for each in measured.workloads
        },
        "decode_flops_share": {
            each.workload.num_requests: each.medians.decode_flops_share for each in measured.workloads
        },
        "prompt_flops_share": {
            each.workload.num_requests: each.medians.prompt_flops_share for each in measured.workloads
        },
        "limits": [measured.limits.bytes_per_second, measured.limits.flops],
        "kernels": measured.kernels,
    }


def measure_transformers(job: Job) -> dict[str, Any]:
    """`generate`, with PEFT's mixed batch (`adapter_names`) when there are adapters."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    names = list(job["adapters"])
    if names:
        import peft

        model = peft.PeftModel.from_pretrained(model, job["adapters"][names[0]], adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(job["adapters"][name], adapter_name=name)
    model.eval()

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        token_ids = torch.tensor(prompts)
        mixed = {"adapter_names": [names[index % len(names)] for index in range(len(prompts))]} if names else {}
        out = model.generate(
            input_ids=token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=output_tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0, **mixed,
        )  # fmt: skip
        return out.shape[1] * out.shape[0] - token_ids.numel()

    return timed(job, generate)


def measure_vllm(job: Job) -> dict[str, Any]:
    """vLLM's offline engine. Source: docs.vllm.ai, "LoRA Adapters"."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    names = list(job["adapters"])
    lora = {"enable_lora": True, "max_loras": len(names), "max_lora_rank": job["rank"]} if names else {}
    length = len(job["prompts"][0]) + job["output_tokens"]
    llm = LLM(
        model=job["model"], dtype=job["dtype"], max_model_len=length, max_num_seqs=max(job["batch_sizes"]),
        enable_prefix_caching=False, **lora,
    )  # fmt: skip
    requests = [LoRARequest(name, index + 1, job["adapters"][name]) for index, name in enumerate(names)]

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        chosen = [requests[index % len(requests)] for index in range(len(prompts))] if requests else None
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, lora_request=chosen, use_tqdm=False
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return timed(job, generate)


def measure_llama_cpp(job: Job) -> dict[str, Any]:
    """One request at a time: llama-cpp-python has no batches, and one adapter for all that it answers."""
    from llama_cpp import Llama

    paths = list(job["gguf_adapters"].values())
    llm = Llama(
        model_path=job["gguf"],
        n_ctx=len(job["prompts"][0]) + job["output_tokens"] + 1,
        n_threads=len(os.sched_getaffinity(0)),
        n_threads_batch=len(os.sched_getaffinity(0)),
        lora_path=paths[0] if paths else None,
        verbose=False,
    )

    def generate(prompts: list[list[int]], output_tokens: int) -> int:
        count = 0
        for prompt in prompts:
            llm.reset()
            tokens = llm.generate(prompt, temp=0.0, top_k=1, reset=True)
            count += sum(1 for _, _ in zip(range(output_tokens), tokens, strict=False))
        return count

    return timed(job, generate)


def timed(job: Job, generate: Generate) -> dict[str, Any]:
    """Output tokens per second of each batch size, prompts' time included."""
    generate(job["prompts"][:WARM_UP_REQUESTS], WARM_UP_TOKENS)
    speeds = {}
    for size in job["batch_sizes"]:
        begun = time.perf_counter()
        count = generate(job["prompts"][:size], job["output_tokens"])
        seconds = time.perf_counter() - begun
        if count != size * job["output_tokens"]:
            raise RuntimeError(f"{count} tokens instead of {size * job['output_tokens']}")
        speeds[size] = count / seconds
    return {"tokens_per_second": speeds}


MEASURES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "graft": measure_graft,
    "transformers": measure_transformers,
    "vllm": measure_vllm,
    "llama.cpp": measure_llama_cpp,
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    result = MEASURES[job["system"]](job)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**result, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()
