"""`graft chat`: a conversation in the terminal, in which the adapter can change from turn to turn."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.engine_options import ModelArgument, engine_options, sampling_options
from graftlm.errors import EngineClosed, GraftError

if TYPE_CHECKING:
    from graftlm import AsyncLLM, SamplingParams

HELP = """\
/adapter NAME   answer with this adapter; the base model's name for none; without NAME: list them
/system TEXT    set the system message; without TEXT: none
/reset          forget the conversation
/help           this list
/exit           leave, as does Ctrl-D; Ctrl-C stops an answer"""


@sampling_options(max_tokens=None)
@engine_options
def chat(
    model: ModelArgument,
    *,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model and its adapters.

    /help lists what can be done besides talking.
    """
    from graftlm import AsyncLLM, SamplingParams

    params = SamplingParams(**sampling)
    llm = AsyncLLM(model, **engine)
    # Gives `input` history and line editing where the platform has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    conversation = Conversation(llm, params, system=system)
    typer.echo("/help lists the commands.")
    with asyncio.Runner() as runner:
        try:
            while _turn(runner, conversation):
                pass
        finally:
            runner.run(llm.shutdown())


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
            typer.echo(conversation.command(line))
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

    def __init__(self, llm: AsyncLLM, params: SamplingParams, *, system: str) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._adapter: str | None = None
        self._messages: list[dict[str, str]] = []

    @property
    def model(self) -> str:
        return self._adapter or self._llm.model_name

    def command(self, line: str) -> str:
        """Do what a line that begins with a slash says; the reply to show.

        Raises:
            ModelNotFound: no adapter has the name.
        """
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        match word:
            case "/adapter" if rest:
                self._adapter = self._llm.resolve_model(rest)
                return f"{self.model} answers."
            case "/adapter":
                return "\n".join([self._llm.model_name, *self._llm.adapters])
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
            InvalidRequest: the template refuses the conversation, or it no longer fits the context.
        """
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *self._messages, {"role": "user", "content": text}]
        token_ids = await self._llm.apply_chat_template(messages, adapter=self._adapter)
        stream = await self._llm.add_request({"prompt_token_ids": list(token_ids)}, self._params, adapter=self._adapter)
        said = ""
        try:
            async for delta in stream:
                piece = "".join(answer.text for answer in delta.outputs)
                typer.echo(piece, nl=False)
                said += piece
        finally:
            stream.abort()
            if said:
                self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
        typer.echo()
