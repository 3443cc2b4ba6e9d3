"""The synchronous front end: everything in this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from graftlm.adapters import Adapter, AdapterChoice, choice_name
from graftlm.config import EngineConfig
from graftlm.engine.engine import Engine
from graftlm.engine.executor import MovedStage, WorkerInfo
from graftlm.engine.memory import return_free_memory
from graftlm.engine.metrics import EngineNumbers
from graftlm.engine.outputs import OutputCollector, RequestFailure, RequestOutput
from graftlm.engine.prompt import Prompt
from graftlm.engine.residency import ResidencyState
from graftlm.engine.sampling_params import SamplingParams
from graftlm.errors import EngineClosed, InvalidRequest

Message = Mapping[str, Any]


class LLM:
    """A base model with adapters, for scripts.

    Args:
        model: model folder, `.gguf` file or hub id.
        options: the other fields of `EngineConfig`, by name.

    Raises:
        ConfigurationError, CheckpointError, AdapterError: the engine cannot be built as asked.

    Example:
        llm = LLM("model/", adapters={"legal": "adapters/legal"})
        outputs = llm.generate(["Dear Sir", "Dear Sir"], SamplingParams(max_tokens=32), adapter=["legal", None])
        print(outputs[0].outputs[0].text)
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._engine: Engine | None = Engine(EngineConfig(model=model, **options))
        self._lock = threading.Lock()

    @classmethod
    def over(cls, engine: Engine) -> LLM:
        """A front end for an engine that was built otherwise; it is shut down with it."""
        llm = cls.__new__(cls)
        llm._engine, llm._lock = engine, threading.Lock()
        return llm

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The processes that compute, when there are others than this one."""
        return self._open().workers

    @property
    def num_lost_workers(self) -> int:
        """Workers that died or did not answer, and were replaced."""
        return self._open().num_lost_workers

    @property
    def num_moves(self) -> int:
        """Times that a worker's layers went to another, or became others, though none was lost."""
        return self._open().num_moves

    def drain(self, target: str) -> tuple[MovedStage, ...]:
        """Have a worker's layers, or a replica, or all of a node's, in other processes, and end those that had them.

        Args:
            target: the id of a worker, a replica or a node, as `workers` has them; a node's may be cut short.

        Raises:
            ObjectNotFound: none of them has this id.
            DrainFailed: there is nowhere else to go; nothing has changed then.
        """
        with self._running() as engine:
            return engine.drain(target, lambda act: act())

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the KV cache."""
        return self._open().core.num_free_blocks

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """What has been loaded, by name, whether its weights are in memory now or not."""
        return self._open().adapters

    @property
    def residency(self) -> Mapping[str, ResidencyState]:
        """Of every adapter that answers, those in `adapter_dir` included, whether its weights are in memory."""
        return self._open().residency

    @property
    def model_name(self) -> str:
        return self._open().model_name

    @property
    def max_model_len(self) -> int:
        """Context length in tokens, prompt and answer together."""
        return self._open().max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers to all prompts, computed together in one running batch, in the prompts' order.

        Args:
            prompts: text, or `{"prompt_token_ids": [...]}`; one or several.
            params: one for all prompts, or one for each.
            adapter: a name, weights by name (a sum of several adapters) or None (the base), for all prompts or each.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound: nothing is generated then.
            AdapterError: an adapter cannot be read, or not any more.
            StepFailed: something broke while the answers were computed; its cause says what.
        """
        many = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        each_params = _one_each(params or SamplingParams(), len(many), "params", SamplingParams)
        choices = _one_each(adapter, len(many), "adapter", object)
        each_adapter = [None if choice is None else choice_name(choice) for choice in choices]
        with self._running() as engine:
            jobs = []
            try:
                for prompt, own_params, own_adapter in zip(many, each_params, each_adapter, strict=True):
                    jobs.append(engine.make_job(prompt, own_params, own_adapter))
            except BaseException:
                for job in jobs:
                    engine.discard(job)
                raise
            collectors = {job.job_id: OutputCollector() for job in jobs}
            for job in jobs:
                engine.core.add(job)
            try:
                while engine.core.has_work:
                    for item in engine.core.step():
                        if isinstance(item, RequestFailure):
                            raise item.error
                        collectors[item.request_id].add(item)
            finally:
                engine.core.abort_all()
            return [collectors[job.job_id].result() for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, rendered by the adapter's own chat template or the model's.

        Args:
            tools: functions that may be called, as OpenAI describes them. Calls are in the answers' text as the model
                writes them; `graftlm.text.tool_calls.ToolCallReader` reads them.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the messages.
        """
        if not messages:
            raise InvalidRequest("there are no messages", param="messages")
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        choices = _one_each(adapter, len(conversations), "adapter", object)
        prompts: list[Prompt] = []
        for conversation, choice in zip(conversations, choices, strict=True):
            tokenizer = self._open().tokenizer_of(None if choice is None else choice_name(choice))
            prompts.append({"prompt_token_ids": tokenizer.encode_chat(conversation, tools=tools)})
        return self.generate(prompts, params, adapter=adapter)

    def logits(self, token_ids: Sequence[int], *, adapter: AdapterChoice | None = None) -> Tensor:
        """Logits of every position, [T, V] float32: row t predicts token t + 1.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound, AdapterError
        """
        with self._running() as engine:
            return engine.token_logits(
                {"prompt_token_ids": token_ids}, None if adapter is None else choice_name(adapter)
            )

    @property
    def metrics(self) -> EngineNumbers:
        """What was done so far."""
        return self._open().metrics.read()

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> Adapter:
        """Load a PEFT adapter from a folder, weights file or hub id; it answers to `name` from now on.

        Its weights stay in memory if there is room, and are read again from where they lie whenever they are needed.

        Args:
            replace: `name` may lead to another adapter until now.

        Raises:
            AdapterError: a subclass says which file, field or tensor is at fault; nothing is changed then.
        """
        return self._open().load_adapter(name, path, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter and free its memory.

        Raises:
            ModelNotFound
        """
        self._open().unload_adapter(name)

    def shutdown(self) -> None:
        """Free everything. May be called twice."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
            del engine
        return_free_memory()

    def _open(self) -> Engine:
        if self._engine is None:
            raise EngineClosed("this LLM was shut down")
        return self._engine

    @contextmanager
    def _running(self) -> Iterator[Engine]:
        """The engine, for one caller at a time."""
        with self._lock:
            yield self._open()


def _one_each(value: Any, count: int, param: str, kind: Any) -> list[Any]:
    """`value` for each of `count` prompts, if it is not a list with one for each already."""
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise InvalidRequest(
            f"{param} is a list of another length than the prompts", param=param, got=len(values), allowed=str(count)
        )
    for each in values:
        if not isinstance(each, kind):
            allowed = getattr(kind, "__name__", str(kind))
            raise InvalidRequest(f"{param} has the wrong type", param=param, got=repr(each)[:100], allowed=allowed)
    return values
