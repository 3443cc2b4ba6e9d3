"""Every engine option with its default, once. The command line and the docs read this class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from graftlm.errors import ConfigurationError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["nf4", "nf4-double", "fp4", "fp4-double", "int8", "none"]
Scheduling = Literal["fcfs", "fair"]
AdapterDType = Literal["auto", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is built from.

    Args:
        model: model folder, `.gguf` file or hub id.
        name: the base model's name in requests; default: the last part of `model`, without .gguf.
        adapters: name -> adapter folder, weights file or hub id, checked before the engine answers.
        adapter_dir: a folder of adapter folders, each of which answers to its own name and is read when it is first
            asked for.
        dtype: of weights, activations and KV cache; "auto" takes the checkpoint's own (float32 for GGUF).
        adapter_dtype: "auto" takes low-rank factors as they were saved and computes with them in float32, as PEFT does;
            "bfloat16" rounds those saved in float32, which then take half the memory and time to read.
        quantization: what the linear layers are quantised to while they are read, as bitsandbytes does it; "none" turns
            a quantised checkpoint's weights into full precision; default: every weight as the checkpoint stores it.
        quantize_head: quantise the output head too, and with it the token table where they are one matrix.
        quantize_skip: modules that are not quantised, by path or whole parts of it, such as "layers.0" or "down_proj".
        quantization_cache: keep what was quantised while loading in $GRAFT_CACHE or ~/.cache/graft; the next start from
            the same files reads it there.
        requantize: let `quantization` replace what a checkpoint is already quantised to; both errors add up.
        int8_threshold: multiply int8 weights as LLM.int8() does: inputs in 8 bits too, but for columns in which some
            row of the step has a magnitude of at least this (6.0 in bitsandbytes), so that rows depend on each other;
            default: inputs stay as they are.
        deterministic: a request's logits have the same bits whatever runs beside it, however its prompt is cut up and
            whatever is cached of it. Slower.
        device: "auto" is CUDA when there is one, else the CPU.
        max_model_len: context length in tokens; default: the model's own.
        kv_cache_bytes: memory for keys and values; default: half of what is free, 4 GiB at most.
        adapter_memory_bytes: memory for adapters' weights; what does not fit is read again when it is asked for.
        block_size: tokens per KV block.
        max_num_seqs: sequences that may run in one step.
        max_queued_requests: answers that may be asked for beyond the `max_num_seqs` that can run; `AsyncLLM` and the
            server refuse more.
        max_num_batched_tokens: tokens in one step, prompt chunks and decodes together.
        prefill_chunk_tokens: most prompt tokens of one request in one step; default: whatever the step has left.
        scheduling: whose turn it is. "fcfs" is first come, first served; "fair" gives adapters with waiting requests
            equal numbers of tokens, and API keys where a server has them.
        fair_shares: adapter, or API key -> how many times the share of the others it gets with "fair".
        prefix_cache: reuse the keys and values of earlier requests that began with the same tokens and adapter.
        replicas: whole engines, each a process on Ray, that share the requests out among them; `max_num_seqs`, memory
            and the rest are each one's own, and so are `workers`; default: one, in this process.
        workers: processes on Ray that share the layers out among them; default: this process computes all of them.
        tensor_parallel: processes that share out every matrix of a layer; with `workers`, of each worker's layers.
        worker_layers: how many layers each worker gets; default: shares in proportion to the speed that workers measure
            as they start, within the memory of their nodes.
        rebalance: move layers from worker to worker while requests run, if what their steps take shows that other
            shares would be faster by a quarter; running requests pause then.
        worker_cpus: cores each worker computes with, or each replica that has none, and reserves on a cluster; default:
            an equal share of this machine's.
        steps_in_flight: steps that are under way at once, each of a part of the requests, so that workers need not wait
            for each other; default: as many as there are stretches of layers.
        activation_journal: workers keep what they give to the next one, in a part of `kv_cache_bytes`, so that when one
            is lost its replacement computes again what is missing, and no other does.
        worker_timeout_seconds: a worker that gives no sign of life, however long its step takes, or a replica that says
            nothing, for so long is taken for dead and replaced.
        ray_address: a Ray cluster that runs already, such as "auto"; default: one is started on this machine for the
            engine alone.
        allow_pickle: read `.bin` adapters (with torch's restricted unpickler); safetensors files always win.
    """

    model: str | Path
    name: str | None = None
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    adapter_dir: Path | None = None
    dtype: DType = "auto"
    adapter_dtype: AdapterDType = "auto"
    quantization: Quantization | None = None
    quantize_head: bool = False
    quantize_skip: Sequence[str] = ()
    quantization_cache: bool = True
    requantize: bool = False
    int8_threshold: float | None = None
    deterministic: bool = False
    device: str = "auto"
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    adapter_memory_bytes: int = 4 << 30
    block_size: int = 16
    max_num_seqs: int = 64
    max_queued_requests: int = 1024
    max_num_batched_tokens: int = 512
    prefill_chunk_tokens: int | None = None
    scheduling: Scheduling = "fcfs"
    fair_shares: Mapping[str, float] = field(default_factory=dict)
    prefix_cache: bool = True
    replicas: int | None = None
    workers: int | None = None
    tensor_parallel: int = 1
    worker_layers: Sequence[int] = ()
    rebalance: bool = False
    worker_cpus: int | None = None
    steps_in_flight: int | None = None
    activation_journal: bool = True
    worker_timeout_seconds: float = 60.0
    ray_address: str | None = None
    allow_pickle: bool = False

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one request in one step."""
        return min(self.prefill_chunk_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def rounds_factors(self) -> bool:
        """Whether low-rank factors of adapters are rounded to bfloat16."""
        return self.adapter_dtype == "bfloat16"

    @property
    def has_workers(self) -> bool:
        """Whether other processes compute."""
        return self.workers is not None or self.tensor_parallel > 1

    @property
    def num_replicas(self) -> int:
        """Whole engines that requests are shared out among."""
        return self.replicas or 1

    @property
    def num_stages(self) -> int:
        """Stretches of layers that are computed one after the other, each by `tensor_parallel` processes."""
        return self.workers or 1

    @property
    def num_processes(self) -> int:
        """Workers of all replicas, or replicas that have none."""
        return self.num_replicas * self.num_stages * self.tensor_parallel

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigurationError(
                "dtype is not one Graft computes in", got=self.dtype, allowed="auto, float32, bfloat16, float16"
            )
        if self.adapter_dtype not in get_args(AdapterDType):
            raise ConfigurationError(
                "adapter_dtype is not one adapters are kept in",
                got=repr(self.adapter_dtype),
                allowed=", ".join(get_args(AdapterDType)),
            )
        if self.quantization is not None and self.quantization not in get_args(Quantization):
            raise ConfigurationError(
                "quantization is not one Graft does while loading",
                got=repr(self.quantization),
                allowed=", ".join(get_args(Quantization)),
            )
        if isinstance(self.quantize_skip, str) or not all(
            isinstance(entry, str) and entry for entry in self.quantize_skip
        ):
            raise ConfigurationError(
                "quantize_skip is not a list of module names", got=repr(self.quantize_skip)[:200], do="give a list"
            )
        for name in ("quantize_head", "quantize_skip", "requantize"):
            if getattr(self, name) and self.quantization in (None, "none"):
                raise ConfigurationError(
                    f"{name} says how to quantise, and nothing is to be quantised", do="set quantization as well"
                )
        if self.int8_threshold is not None and not 0 < self.int8_threshold < math.inf:
            raise ConfigurationError(
                "int8_threshold is no magnitude", got=self.int8_threshold, allowed="positive numbers, such as 6.0"
            )
        if self.int8_threshold is not None and self.deterministic:
            raise ConfigurationError(
                "with int8_threshold a row depends on its neighbours, and deterministic promises that none does",
                do="leave one of them out",
            )
        if self.scheduling not in ("fcfs", "fair"):
            raise ConfigurationError("scheduling is not a policy", got=repr(self.scheduling), allowed="fcfs, fair")
        for name, share in self.fair_shares.items():
            is_number = isinstance(share, int | float) and not isinstance(share, bool)
            if not is_number or not 0 < share < math.inf:
                raise ConfigurationError(
                    f"the fair share of {name} is not one", got=repr(share), allowed="positive numbers"
                )
        if self.fair_shares and self.scheduling != "fair":
            raise ConfigurationError(
                "fair_shares have no meaning with this scheduling", got=self.scheduling, do="set scheduling to fair"
            )
        positive = (
            "adapter_memory_bytes",
            "block_size",
            "max_num_seqs",
            "max_queued_requests",
            "max_num_batched_tokens",
            "tensor_parallel",
        )
        optional = (
            "max_model_len",
            "kv_cache_bytes",
            "prefill_chunk_tokens",
            "replicas",
            "workers",
            "worker_cpus",
            "steps_in_flight",
        )
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} must be a positive integer", got=repr(value))
        self._check_workers()

    def _check_workers(self) -> None:
        if not self.has_workers:
            about = ["worker_layers", "rebalance", "steps_in_flight"]
            for name in about if self.replicas else (*about, "worker_cpus", "ray_address"):
                if getattr(self, name):
                    raise ConfigurationError(f"{name} is about workers, and there are none", do="set workers as well")
            if not self.activation_journal:
                raise ConfigurationError("without workers there is no activation_journal to leave out")
        elif self.worker_layers and (
            len(self.worker_layers) != self.num_stages or not all(count >= 1 for count in self.worker_layers)
        ):
            raise ConfigurationError(
                "worker_layers does not fit workers",
                got=list(self.worker_layers),
                allowed=f"{self.num_stages} positive integers",
            )
        if self.rebalance and self.worker_layers:
            raise ConfigurationError(
                "worker_layers says how many layers each worker has, and rebalance changes that",
                do="leave one of them out",
            )
        if not 0 < self.worker_timeout_seconds < float("inf"):
            raise ConfigurationError("worker_timeout_seconds must be positive", got=self.worker_timeout_seconds)
