"""`graft generate`: answers to prompts, from the base or any adapters, in one batch; or to a file of them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.api_client import ApiClient, ApiKeyOption, is_url
from graftlm.cli.batch_file import BatchFile
from graftlm.cli.batch_output import BatchOutput
from graftlm.cli.batch_run import BatchCount, run_batch
from graftlm.cli.engine_options import check_no_engine_options, engine_options, given_sampling, sampling_options
from graftlm.cli.options import field_help
from graftlm.cli.speakers import RemoteSpeaker
from graftlm.config import EngineConfig
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
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=f"{field_help(EngineConfig)['model']} With --file a server's URL too."),
    ],
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
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Rows to answer, one JSON object a line: prompt or messages, and if it likes an id, a model and "
            "sampling fields; or OpenAI's batch format.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where the rows' answers are appended; rows that are there are skipped."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="With --file, rows that are in work at a time.")] = 128,
    api_key: ApiKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer.")] = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer prompts.

    Every prompt goes to every adapter in use, all in one batch. With --file each row is answered once, by the adapter
    it names, and what was answered before a run was cut short is not answered again.
    """
    if file is not None or output is not None:
        if file is None or output is None or prompt or as_json or len(use or ()) > 1:
            raise ConfigurationError(
                "a file is answered into a file", allowed="--file FILE --output FILE, and at most one --use"
            )
        _generate_file(
            model, file, output, engine, sampling, use=use[0] if use else None, chat=chat, concurrency=concurrency,
            api_key=api_key,
        )  # fmt: skip
        return
    prompts = prompt or [_from_stdin()]

    from graftlm import AsyncLLM, SamplingParams

    params = SamplingParams(**sampling)
    llm = AsyncLLM(model, **engine)
    models = use or list(llm.adapters) or [llm.model_name]
    jobs = [Job(prompt=text, model=name, adapter=llm.resolve_model(name)) for text in prompts for name in models]
    for job, answer in zip(jobs, asyncio.run(_answers(llm, jobs, params, chat=chat)), strict=True):
        if as_json:
            typer.echo(json.dumps(_record(job, answer), ensure_ascii=False))
        else:
            if len(jobs) > 1:
                _print_heading(job.model, job.prompt if len(prompts) > 1 else None)
            typer.echo(answer.outputs[0].text)


def _generate_file(
    model: str,
    file: Path,
    output: Path,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any],
    *,
    use: str | None,
    chat: bool,
    concurrency: int,
    api_key: str | None,
) -> None:
    defaults = given_sampling(sampling)
    if is_url(model):
        check_no_engine_options(engine, why="the server has its own")
    count = BatchCount()

    async def answer() -> None:
        llm: AsyncLLM | None = None
        if is_url(model):
            client = ApiClient.of_url(model, api_key)
        else:
            from graftlm import AsyncLLM

            llm = AsyncLLM(model, **engine)
            client = ApiClient.of_engine(llm)
        try:
            base = (await RemoteSpeaker.connect(client, {})).base if use is None else use
            source = BatchFile(file, defaults=defaults, model=base, chat=chat)
            await run_batch(client, source, rows, count, concurrency=concurrency)
        finally:
            await client.aclose()
            if llm is not None:
                await llm.shutdown()

    # What is wrong with the files is said before a model is loaded.
    BatchFile(file, defaults=defaults, model="", chat=chat)
    rows = BatchOutput(output)
    try:
        asyncio.run(answer())
    except KeyboardInterrupt:
        typer.echo(f"graft: stopped; {count}; run it again to go on", err=True)
        raise typer.Exit(130) from None
    finally:
        rows.close()
    typer.echo(f"{output}: {count}", err=True)
    if count.failed:
        raise typer.Exit(1)


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
