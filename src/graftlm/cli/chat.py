"""`graft chat`: a conversation in the terminal, in which the adapter can change from turn to turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from graftlm.cli.api_client import ApiClient, ApiKeyOption, is_url
from graftlm.cli.engine_options import check_no_engine_options, engine_options, given_sampling, sampling_options
from graftlm.cli.options import field_help
from graftlm.cli.speakers import LocalSpeaker, RemoteSpeaker, Speaker
from graftlm.config import EngineConfig
from graftlm.errors import EngineClosed, GraftError

HELP = """\
/adapter NAME   answer with this adapter; the base model's name for none; without NAME: list them
/system TEXT    set the system message; without TEXT: none
/reset          forget the conversation
/help           this list
/exit           leave, as does Ctrl-D; Ctrl-C stops an answer"""
_MAX_HISTORY_LINES = 1000


@sampling_options(max_tokens=None)
@engine_options
def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|URL", help=f"{field_help(EngineConfig)['model']} Or a server's URL.")
    ],
    *,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    use: Annotated[str, typer.Option(help="The adapter that answers first; the base without it.")] = "",
    api_key: ApiKeyOption = None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model and its adapters, in this process or on a server.

    /help lists what can be done besides talking.
    """
    asked = given_sampling(sampling)
    with asyncio.Runner() as runner, _line_history():
        speaker: Speaker
        if is_url(model):
            check_no_engine_options(engine, why="the server has its own")
            speaker = runner.run(_connect(model, api_key, asked))
        else:
            from graftlm import AsyncLLM, SamplingParams

            speaker = LocalSpeaker(AsyncLLM(model, **engine), SamplingParams(**sampling))
        try:
            conversation = Conversation(speaker, system=system)
            if use:
                runner.run(conversation.choose(use))
            typer.echo("/help lists the commands.")
            while _turn(runner, conversation):
                pass
        finally:
            runner.run(speaker.close())


async def _connect(url: str, api_key: str | None, sampling: dict[str, Any]) -> RemoteSpeaker:
    client = ApiClient.of_url(url, api_key)
    try:
        return await RemoteSpeaker.connect(client, sampling)
    except BaseException:
        await client.aclose()
        raise


@contextmanager
def _line_history() -> Iterator[None]:
    """Line editing and a history of what was typed, kept for the next conversation, where the platform has it."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    file = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "graft" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(_MAX_HISTORY_LINES)
        with contextlib.suppress(OSError):
            # What people say to a model is nobody else's to read.
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)


def _turn(runner: asyncio.Runner, conversation: Conversation) -> bool:
    """Read one line and act on it. False: the user wants to leave."""
    try:
        line = input(f"\n{conversation.model}> ").strip()
    except EOFError:
        typer.echo()
        return False
    except KeyboardInterrupt:
        typer.echo("\n/exit or Ctrl-D leaves.")
        return True
    if line == "/exit":
        return False
    try:
        if line.startswith("/"):
            typer.echo(runner.run(conversation.command(line)))
        elif line:
            # The runner turns Ctrl-C into a cancelled answer.
            runner.run(conversation.answer(line))
    except KeyboardInterrupt:
        typer.echo()
    except EngineClosed:
        raise
    except GraftError as error:
        typer.echo(str(error), err=True)
    return True


class Conversation:
    """What has been said, and who answers next."""

    def __init__(self, speaker: Speaker, *, system: str) -> None:
        self._speaker = speaker
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.model = speaker.base

    async def choose(self, name: str) -> None:
        """Let this model answer from now on.

        Raises:
            ModelNotFound
        """
        self.model = await self._speaker.resolve(name)

    async def command(self, line: str) -> str:
        """Do what a line that begins with a slash says; the reply to show.

        Raises:
            ModelNotFound: no adapter has the name.
        """
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word:
            case "/adapter" if rest:
                await self.choose(rest)
                return f"{self.model} answers."
            case "/adapter":
                return "\n".join(await self._speaker.names())
            case "/system":
                self._system = rest
                return "The system message is set." if rest else "There is no system message."
            case "/reset":
                self._messages.clear()
                return "The conversation is forgotten."
            case "/help":
                return HELP
            case _:
                return f"{word} is not a command.\n{HELP}"

    async def answer(self, text: str) -> None:
        """Print the answer as it comes. Cut short, it stays in the conversation as far as it came; a message without an
        answer does not stay.

        Raises:
            InvalidRequest, RemoteError: the template refuses the conversation, or it no longer fits the context.
        """
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *self._messages, {"role": "user", "content": text}]
        said = ""
        try:
            async with aclosing(self._speaker.answer(messages, self.model)) as pieces:
                async for piece in pieces:
                    typer.echo(piece, nl=False)
                    said += piece
        finally:
            if said:
                self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        typer.echo()
