"""Building an engine from its configuration, and what every front end shares: names, adapters, prompts, the core."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from graftlm.adapters import (
    Adapter,
    AdapterFolder,
    AdapterRegistry,
    AdapterWeights,
    LoadedAdapter,
    load_adapter,
    read_weights,
)
from graftlm.adapters.files import folder_bytes
from graftlm.adapters.name import naming
from graftlm.adapters.registry import names_in
from graftlm.adapters.text import AdapterTexts
from graftlm.adapters.weighted import combine_weights, is_weighted
from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.config import EngineConfig
from graftlm.engine.base import Base, load_text
from graftlm.engine.executor import BetweenSteps, MovedStage, WorkerInfo
from graftlm.engine.job import Job
from graftlm.engine.metrics import EngineMetrics, EngineState
from graftlm.engine.name_locks import NameLocks
from graftlm.engine.prompt import Prompt, PromptChecker
from graftlm.engine.request import Resumption
from graftlm.engine.residency import Residency, ResidencyState
from graftlm.engine.runner import ComputableModel, JobRunner
from graftlm.engine.sampling_params import SamplingParams
from graftlm.engine.served_model import serve_here
from graftlm.engine.tenant import Tenant
from graftlm.errors import AdapterError, AdapterMemoryExceeded, ConfigurationError, ModelNotFound
from graftlm.models.heap import trim_heap
from graftlm.text import Tokenizer

LoadModel = Callable[[EngineConfig, Checkpoint, Residency[LoadedAdapter]], ComputableModel]


class Engine:
    """A loaded base model, its adapters by name, and the core that runs jobs on them.

    Args:
        wake: lets a front end that does other things look for work, from any thread; weights that are not in memory
            are then read beside its steps, and else in them.
        load: makes the model ready; default: here, or in the processes the config asks for.

    Raises:
        ConfigurationError: an option cannot be met here.
        CheckpointError: the base cannot be read.
        AdapterError: one of the adapters to start with cannot be served; nothing is left loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        wake: Callable[[], None] | None = None,
        load: LoadModel | None = None,
    ) -> None:
        load = load or _load
        self.config = config
        self.model_name = config.name or Path(config.model).name.removesuffix(".gguf")
        self._folder = None if config.adapter_dir is None else _adapter_folder(config.adapter_dir)
        self._residency = _residency(config)
        self.registry = AdapterRegistry(base_name=self.model_name, forget=self._residency.discard, folder=self._folder)
        self._checking = NameLocks()
        checkpoint = open_checkpoint(config.model)
        model = load(config, checkpoint, self._residency)
        self._model = model
        base = load_text(checkpoint, model.vocab_size)
        checkpoint.close()
        self._whole = None if model.decoder is None else Base(decoder=model.decoder, **vars(base))
        self.tokenizer = base.tokenizer
        self.max_model_len = model.plan.max_model_len
        self._base = model.base
        self._has_all_layers = model.has_all_layers
        self._texts = AdapterTexts(self.tokenizer, base.folder)
        self.metrics = EngineMetrics(base_name=self.model_name)
        self.core: JobRunner = model.runner(
            config,
            registry=self.registry,
            metrics=self.metrics,
            residency=self._residency,
            read_weights=self._read_weights,
            wake=wake,
        )
        self._checker = PromptChecker(
            self.tokenizer,
            vocab_size=model.vocab_size,
            plan=model.plan,
            end_token_ids=base.end_token_ids,
        )
        try:
            for name, source in config.adapters.items():
                self.load_adapter(name, source)
        except BaseException:
            self.close()
            raise

    @property
    def whole_base(self) -> Base:
        """The base model, to be trained on.

        Raises:
            ConfigurationError: it is not in this process.
        """
        if self._whole is None:
            raise ConfigurationError(
                "training beside serving needs the model in one process", do="serve without workers and replicas"
            )
        return self._whole

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The processes that compute, if they are others."""
        return self._model.workers

    @property
    def num_lost_workers(self) -> int:
        return self._model.num_lost_workers

    @property
    def num_moves(self) -> int:
        """Times that a worker's layers went to another, or became others, though none was lost."""
        return self._model.num_moves

    def drain(self, target: str, between_steps: BetweenSteps) -> tuple[MovedStage, ...]:
        """Have a worker's layers, or all of a node's, in other processes. In a thread of its own, beside the steps.

        Raises:
            ObjectNotFound, DrainFailed, CheckpointError
        """
        return self._model.drain(target, between_steps)

    def close(self) -> None:
        """Let go of threads, and of everything outside this process. May be called twice."""
        self.core.close()
        self._model.close()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self.registry.adapters

    @property
    def state(self) -> EngineState:
        """How full it is now. Any thread may ask."""
        return EngineState(
            num_running=self.core.num_running,
            num_waiting=self.core.num_waiting,
            num_free_blocks=self.core.num_free_blocks,
            num_blocks=self.core.num_blocks,
            num_adapters=len(self._residency.resident),
            resident=self._residency.resident,
            adapter_bytes=self._residency.max_bytes - self._residency.free_bytes,
            is_resident={
                name: self._residency.state(adapter.digest) == "resident"
                for name, adapter in self.registry.adapters.items()
            },
        )

    @property
    def residency(self) -> Mapping[str, ResidencyState]:
        """Of every name that answers, whether its weights are in memory."""
        known = self.registry.adapters
        return {
            name: self._residency.state(known[name].digest) if name in known else "absent"
            for name in self.registry.names
        }

    def load_adapter(self, name: str, source: str | Path, *, replace: bool = False) -> Adapter:
        """Read, check and register an adapter. Safe to call from any thread: running jobs do not notice.

        It is checked beside `adapter_memory_bytes`, and kept in memory if there is room: nothing is evicted but for a
        request.

        Args:
            replace: the name may lead to another adapter already; what is accepted runs on with that one.

        Raises:
            AdapterError: says which adapter, and what is wrong; nothing is kept of it then.
        """
        with self._checking.hold(name):
            self.registry.check_name(name, replace=replace)
            try:
                loaded = self._load(name, source)
            except AdapterError as error:
                raise naming(name, error) from error
            with self._kept(loaded):
                self.registry.add(loaded.adapter, replace=replace)
        if replace:
            trim_heap()
        return loaded.adapter

    def knows(self, model: str | None) -> bool:
        """Whether all adapters that a model name speaks of have been read, or there is none of that name anyway.

        Raises:
            InvalidRequest: it looks like a weighted sum and is none.
        """
        return not self._unread(model)

    def bytes_to_introduce(self, model: str | None) -> int | None:
        """What `introduce` would read, of the largest adapter; None if it cannot be seen."""
        sizes = [folder_bytes(path) for path in self._unread(model).values()]
        seen = [size for size in sizes if size is not None]
        return max(seen, default=0) if len(seen) == len(sizes) else None

    def introduce(self, model: str | None) -> None:
        """Read the adapters that a model name speaks of and that so far only lie in the adapter folder.

        Raises:
            AdapterError: one of them cannot be served. It can once its files are good.
        """
        for name in self._unread(model):
            # Of many requests for one adapter, one reads it.
            with self._checking.hold(name):
                path = self._unread(name).get(name)
                if path is None or self._folder is None:
                    continue
                try:
                    self._folder.check_contained(path)
                    loaded = self._load(name, path)
                except AdapterError as error:
                    raise naming(name, error, hide=path) from error
                with self._kept(loaded):
                    self.registry.introduce(loaded.adapter)

    def _unread(self, model: str | None) -> dict[str, Path]:
        """Of the adapters that a model name speaks of, those that so far only lie in the adapter folder."""
        if model is None or self._folder is None:
            return {}
        paths = {name: self._folder.locate(name) for name in names_in(model) if not self.registry.has_read(name)}
        return {name: path for name, path in paths.items() if path is not None}

    def _introduced(self, model: str, ask: Callable[[str], Adapter]) -> Adapter:
        """What the registry answers once it knows the adapters that a model name speaks of. Somebody may make it forget
        one of them in between."""
        while True:
            self.introduce(model)
            try:
                return ask(model)
            except ModelNotFound:
                if not all(map(self.registry.answers_to, names_in(model))):
                    raise

    def _load(self, name: str, source: str | Path) -> LoadedAdapter:
        max_bytes = self._residency.max_bytes
        begun = time.perf_counter()
        loaded = load_adapter(
            name,
            source,
            self._base,
            max_bytes=max_bytes,
            allow_pickle=self.config.allow_pickle,
            round_factors=self.config.rounds_factors,
            texts=self._texts,
        )
        loaded = self._placed(loaded)
        self._check_fits(loaded.adapter)
        self.metrics.loaded(name, time.perf_counter() - begun)
        return loaded

    @contextmanager
    def _kept(self, loaded: LoadedAdapter) -> Iterator[None]:
        """Have the weights that were read ready for the first request, if there is room and a name still needs them
        afterwards."""
        self.registry.hold(loaded.adapter)
        try:
            yield
            self._residency.offer(loaded.adapter.digest, loaded.adapter.num_bytes, loaded)
        finally:
            self.registry.release(loaded.adapter)

    def _check_fits(self, adapter: Adapter) -> None:
        if adapter.num_bytes > self._residency.max_bytes:
            raise AdapterMemoryExceeded(
                "the weights are larger than adapter_memory_bytes",
                got=f"{adapter.num_bytes} bytes",
                allowed=f"{self._residency.max_bytes} bytes",
                do="raise adapter_memory_bytes",
            )

    def _read_weights(self, adapter: Adapter) -> AdapterWeights:
        """The weights of a known adapter, or of a sum of them, as they were when it was loaded.

        Raises:
            AdapterError
        """
        if adapter.source is None:
            return combine_weights([(self._weights_of_part(part), weight) for part, weight in adapter.parts])
        try:
            return read_weights(
                adapter.source,
                adapter.digest,
                self._base,
                max_bytes=self._residency.max_bytes,
                allow_pickle=self.config.allow_pickle,
                round_factors=self.config.rounds_factors,
            )
        except AdapterError as error:
            raise naming(adapter.name, error, hide=adapter.source.parent) from error

    def _weights_of_part(self, part: Adapter) -> AdapterWeights:
        """From memory if they are there, and without making them stay."""
        if not self._residency.pin(part.digest):
            return self._read_weights(part)
        try:
            return self._residency.weights(part.digest).weights
        finally:
            self._residency.unpin(part.digest)

    def _placed(self, loaded: LoadedAdapter) -> LoadedAdapter:
        """Where workers share the layers out, however that is, each has room in its cache for its own layers alone."""
        adapter = loaded.adapter
        if self._has_all_layers or not adapter.replicates_layers:
            return loaded
        return replace(loaded, adapter=replace(adapter, cache_factor=adapter.most_repeats))

    def tokenizer_of(self, adapter: str | None) -> Tokenizer:
        """The tokenizer that serves an adapter, or the base, whose tokenizer serves weighted sums too.

        Raises:
            ModelNotFound, AdapterError
        """
        if adapter is None or is_weighted(adapter):
            return self.tokenizer
        own = self._introduced(adapter, self.registry.get).text.tokenizer
        return self.tokenizer if own is None else own

    def unload_adapter(self, name: str) -> Adapter:
        """Take an adapter's name away. Running jobs finish with it; its memory returns with the last of them.

        What lies in the adapter folder is forgotten, and read again when it is asked for.

        Returns: what the name led to.

        Raises:
            ModelNotFound
        """
        adapter = self.registry.remove(name)
        trim_heap()
        return adapter

    def make_job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        adapter: str | None,
        tenant: Tenant | None = None,
        resume: Resumption | None = None,
    ) -> Job:
        """A checked job that holds its adapter. It goes to the core, which lets go when the job ends, or to `discard`.

        Args:
            tenant, resume: as for `PromptChecker.job`.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound, AdapterError
        """
        held = self._acquire(adapter)
        try:
            return self._checker.job(prompt, params, held, tenant, resume)
        except BaseException:
            if held is not None:
                self.registry.release(held)
            raise

    def has_grammar(self, params: SamplingParams, adapter: str | None) -> bool:
        """Whether `make_job` need not compile the grammar of these parameters.

        Raises:
            ModelNotFound, AdapterError
        """
        if params.structured is None:
            return True
        with self._holding(adapter) as held:
            return self._checker.has_grammar(params, held)

    def compile_grammar(self, params: SamplingParams, adapter: str | None) -> None:
        """Have the grammar of these parameters compiled.

        Raises:
            InvalidRequest: it cannot be enforced.
            ModelNotFound, AdapterError
        """
        with self._holding(adapter) as held:
            self._checker.grammar(params, held)

    def discard(self, job: Job) -> None:
        """Let go of a job that was never given to the core."""
        if job.adapter is not None:
            self.registry.release(job.adapter)

    def token_logits(self, prompt: Prompt, adapter: str | None) -> Tensor:
        """Logits of every position of a prompt, [T, V] float32. Not while jobs are running.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound, AdapterError
        """
        with self._holding(adapter) as held:
            return self.core.logits(self._checker.token_ids(prompt, held), held)

    @contextmanager
    def _holding(self, model: str | None) -> Iterator[Adapter | None]:
        held = self._acquire(model)
        try:
            yield held
        finally:
            if held is not None:
                self.registry.release(held)

    def _acquire(self, model: str | None) -> Adapter | None:
        if model is None:
            return None
        adapter = self._introduced(model, self.registry.acquire)
        try:
            self._check_fits(adapter)
        except AdapterMemoryExceeded as error:
            self.registry.release(adapter)
            raise naming(adapter.name, error) from error
        return adapter


def _adapter_folder(folder: str | Path) -> AdapterFolder:
    path = Path(folder)
    if not path.is_dir():
        raise ConfigurationError("adapter_dir is not a folder", got=path)
    return AdapterFolder(path)


def _residency(config: EngineConfig) -> Residency[LoadedAdapter]:
    if config.replicas is None:
        return Residency(config.adapter_memory_bytes)
    from graftlm.distributed.start import residency_on_replicas

    return residency_on_replicas(config)


def _load(config: EngineConfig, checkpoint: Checkpoint, residency: Residency[LoadedAdapter]) -> ComputableModel:
    if config.replicas is not None:
        from graftlm.distributed.start import serve_on_replicas

        return serve_on_replicas(config, checkpoint)
    if config.has_workers:
        from graftlm.distributed.start import serve_on_ray

        return serve_on_ray(config, checkpoint, residency)
    return serve_here(config, checkpoint, residency)
