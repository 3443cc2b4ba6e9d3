"""Building an engine from its configuration, and what every front end shares: names, adapters, prompts, the core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from graftlm.adapters import Adapter, AdapterRegistry, load_adapter
from graftlm.adapters.text import AdapterTexts
from graftlm.adapters.weighted import is_weighted
from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.config import EngineConfig
from graftlm.engine.base import load_text
from graftlm.engine.block_pool import BlockPool
from graftlm.engine.cache_blocks import CacheBlocks, CacheGroup
from graftlm.engine.core import EngineCore
from graftlm.engine.executor import WorkerInfo
from graftlm.engine.job import Job
from graftlm.engine.memory import trim_heap
from graftlm.engine.metrics import EngineMetrics, EngineState
from graftlm.engine.prompt import Prompt, PromptChecker
from graftlm.engine.sampling_params import SamplingParams
from graftlm.engine.scheduler import Scheduler
from graftlm.engine.served_model import ServedModel, serve_here
from graftlm.errors import AdapterError
from graftlm.text import Tokenizer

LoadModel = Callable[[EngineConfig, Checkpoint], ServedModel]


class Engine:
    """A loaded base model, its adapters by name, and the core that runs jobs on them.

    Args:
        load: makes the model ready; default: here, or on the workers the config asks for.

    Raises:
        ConfigurationError: an option cannot be met here.
        CheckpointError: the base cannot be read.
        AdapterError: one of the adapters to start with cannot be served; nothing is left loaded.
    """

    def __init__(self, config: EngineConfig, *, load: LoadModel | None = None) -> None:
        load = load or _load
        self.config = config
        self.model_name = config.name or Path(config.model).name.removesuffix(".gguf")
        checkpoint = open_checkpoint(config.model)
        model = load(config, checkpoint)
        self._executor = model.executor
        base = load_text(checkpoint, model.vocab_size)
        checkpoint.close()
        self.tokenizer = base.tokenizer
        self.max_model_len = model.plan.max_model_len
        self.registry = AdapterRegistry(base_name=self.model_name, max_bytes=config.adapter_memory_bytes)
        self._base = model.base
        self._loading = threading.Lock()
        self._texts = AdapterTexts(self.tokenizer, base.folder)
        self.metrics = EngineMetrics(base_name=self.model_name)
        self.core = _core(config, model, self.registry, self.metrics)
        self._checker = PromptChecker(
            self.tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=self.max_model_len,
            end_token_ids=base.end_token_ids,
        )
        try:
            for name, source in config.adapters.items():
                self.load_adapter(name, source)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The processes that compute, if they are others."""
        return self._executor.workers

    def close(self) -> None:
        """Let go of everything outside this process. May be called twice."""
        self._executor.close()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self.registry.adapters

    @property
    def state(self) -> EngineState:
        """How full it is now. Any thread may ask."""
        adapters = self.adapters.values()
        return EngineState(
            num_running=self.core.num_running,
            num_waiting=self.core.num_waiting,
            num_free_blocks=self.core.num_free_blocks,
            num_blocks=self.core.num_blocks,
            num_adapters=len(adapters),
            adapter_bytes=sum(adapter.num_bytes for adapter in adapters),
        )

    def load_adapter(self, name: str, source: str | Path) -> Adapter:
        """Read, check and register an adapter. Safe to call from any thread: running jobs do not notice.

        Raises:
            AdapterError: says which adapter, and what is wrong; nothing is kept of it then.
        """
        # One at a time: each load sees what the last one left of the memory, and no name is read twice at once.
        with self._loading:
            self.registry.check_name(name)
            try:
                adapter = load_adapter(
                    name,
                    source,
                    self._base,
                    max_bytes=self.registry.free_bytes,
                    allow_pickle=self.config.allow_pickle,
                    texts=self._texts,
                )
            except AdapterError as error:
                what = f"adapter {name}: {error.what}"
                raise type(error)(what, got=error.got, allowed=error.allowed, do=error.do) from error
            self.registry.add(adapter)
        return adapter

    def tokenizer_of(self, adapter: str | None) -> Tokenizer:
        """The tokenizer that serves an adapter, or the base, whose tokenizer serves weighted sums too.

        Raises:
            ModelNotFound
        """
        if adapter is None or is_weighted(adapter):
            return self.tokenizer
        own = self.registry.get(adapter).text.tokenizer
        return self.tokenizer if own is None else own

    def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away. Running jobs finish with it; its memory returns with the last of them.

        Raises:
            ModelNotFound
        """
        self.registry.remove(name)
        trim_heap()

    def make_job(self, prompt: Prompt, params: SamplingParams, adapter: str | None) -> Job:
        """A checked job that holds its adapter. It goes to the core, which lets go when the job ends, or to `discard`.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound
        """
        held = None if adapter is None else self.registry.acquire(adapter)
        try:
            return self._checker.job(prompt, params, held)
        except BaseException:
            if held is not None:
                self.registry.release(held)
            raise

    def discard(self, job: Job) -> None:
        """Let go of a job that was never given to the core."""
        if job.adapter is not None:
            self.registry.release(job.adapter)

    def token_logits(self, prompt: Prompt, adapter: str | None) -> Tensor:
        """Logits of every position of a prompt, [T, V] float32. Not while jobs are running.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound
        """
        held = None if adapter is None else self.registry.acquire(adapter)
        try:
            return self.core.logits(self._checker.token_ids(prompt, held), held)
        finally:
            if held is not None:
                self.registry.release(held)


def _core(config: EngineConfig, model: ServedModel, registry: AdapterRegistry, metrics: EngineMetrics) -> EngineCore:
    groups = [
        CacheGroup(window=window, pool=BlockPool(num_blocks))
        for window, num_blocks in zip(model.windows, model.plan.num_blocks, strict=True)
    ]
    blocks = CacheBlocks(groups, block_size=config.block_size, chunk_tokens=config.chunk_tokens)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_cache=config.prefix_cache,
        length_regimes=model.length_regimes,
    )
    return EngineCore(scheduler=scheduler, executor=model.executor, blocks=blocks, registry=registry, metrics=metrics)


def _load(config: EngineConfig, checkpoint: Checkpoint) -> ServedModel:
    if config.workers is None:
        return serve_here(config, checkpoint)
    from graftlm.distributed.start import serve_on_ray

    return serve_on_ray(config, checkpoint)
