"""`graft generate`: answers to prompts, from the base or any adapters, in one batch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.engine_options import ModelArgument, engine_options, sampling_options
from graftlm.errors import ConfigurationError

if TYPE_CHECKING:
    from graftlm import AsyncLLM, SamplingParams
    from graftlm.engine.outputs import RequestOutput


@dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt for one model. adapter: None is the base, whose name is `model` then."""

    prompt: str
    model: str
    adapter: str | None


@sampling_options(max_tokens=256)
@engine_options
def generate(
    model: ModelArgument,
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="What to answer, read from stdin without one. Repeat it for more."),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            help="Adapter, or base model, that answers. Repeat it for more; none uses every --adapter, else the base."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer.")] = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer prompts.

    Every prompt goes to every adapter in use, all in one batch.
    """
    prompts = prompt or [_from_stdin()]

    from graftlm import AsyncLLM, SamplingParams

    params = SamplingParams(**sampling)
    llm = AsyncLLM(model, **engine)
    models = use or list(llm.adapters) or [llm.model_name]
    jobs = [Job(prompt=text, model=name, adapter=llm.resolve_model(name)) for text in prompts for name in models]
    for job, output in zip(jobs, asyncio.run(_answers(llm, jobs, params, chat=chat)), strict=True):
        if as_json:
            typer.echo(json.dumps(_record(job, output), ensure_ascii=False))
        else:
            if len(jobs) > 1:
                _print_heading(job.model, job.prompt if len(prompts) > 1 else None)
            typer.echo(output.outputs[0].text)


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigurationError("there is nothing to answer", do="give --prompt TEXT, or pipe a prompt in")
    return sys.stdin.read().removesuffix("\n")


async def _answers(llm: AsyncLLM, jobs: Sequence[Job], params: SamplingParams, *, chat: bool) -> list[RequestOutput]:
    try:
        return await asyncio.gather(*(_answer(llm, job, params, chat=chat) for job in jobs))
    finally:
        await llm.shutdown()


async def _answer(llm: AsyncLLM, job: Job, params: SamplingParams, *, chat: bool) -> RequestOutput:
    if not chat:
        return await llm.generate(job.prompt, params, adapter=job.adapter)
    messages = [{"role": "user", "content": job.prompt}]
    token_ids = await llm.apply_chat_template(messages, adapter=job.adapter)
    return await llm.generate({"prompt_token_ids": list(token_ids)}, params, adapter=job.adapter)


def _record(job: Job, output: RequestOutput) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "model": job.model,
        "prompt": job.prompt,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
    }


def _print_heading(model: str, prompt: str | None) -> None:
    shown = "" if prompt is None else f": {prompt if len(prompt) <= 60 else prompt[:59] + '…'}"
    typer.secho(f"== {model}{shown}".replace("\n", " "), bold=True)
