"""`graft chat`."""

from __future__ import annotations

from typer.testing import CliRunner

from graftlm import LLM, SamplingParams
from graftlm.cli import app
from tests.cli.conftest import Files
from tests.cli.graft_process import graft_process


def talk(files: Files, *lines: str) -> str:
    """What is printed when these lines are typed, after which the input ends."""
    arguments = ["chat", *files.arguments, "--temperature", "0", "--max-tokens", "6"]
    result = CliRunner().invoke(app, arguments, input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    return result.output


def test_a_conversation_remembers_changes_adapter_and_forgets(files: Files) -> None:
    llm = LLM(files.base, name="tiny", adapters={"red": files.red, "blue": files.blue}, kv_cache_bytes=16 << 20)
    params = SamplingParams(temperature=0, max_tokens=6)

    def answer(adapter: str | None, *turns: str) -> str:
        roles = ["system"] * (turns[0] == "Be brief.") + ["user", "assistant"] * len(turns)
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        return llm.chat(messages, params, adapter=adapter)[0].outputs[0].text

    first = answer(None, "hello")
    second = answer("red", "hello", first, "more")
    third = answer("red", "Be brief.", "again")
    llm.shutdown()
    printed = talk(files, "hello", "/adapter red", "more", "/reset", "/system Be brief.", "again")
    for prompt, text in (("tiny> ", first), ("red> ", second), ("red> ", third)):
        assert prompt + text + "\n" in printed


def test_commands_answer_and_mistakes_do_not_end_the_conversation(files: Files) -> None:
    printed = talk(files, "/help", "/adapter", "/adapter green", "/dance", "", "/system", "/exit", "not read")
    assert "/reset" in printed
    assert "tiny\nred\nblue\n" in printed
    assert "no model answers to this name" in printed
    assert "/dance is not a command." in printed
    assert "There is no system message." in printed
    assert printed.count("tiny> ") == 7


def test_a_conversation_that_no_longer_fits_says_so_and_goes_on(files: Files) -> None:
    arguments = ["chat", *files.arguments, "--max-model-len", "64"]
    result = CliRunner().invoke(app, arguments, input=f"{'x' * 100}\n/reset\n")
    assert result.exit_code == 0
    assert "maximum context length is 64" in result.output
    assert "The conversation is forgotten." in result.output


def test_ctrl_c_stops_the_answer_and_not_the_program(files: Files) -> None:
    with graft_process("chat", *files.arguments, "--ignore-eos") as graft:
        graft.read_until("tiny> ")
        graft.type("hello")
        graft.read_more(20)
        graft.interrupt()
        graft.read_until("\n\ntiny> ")
        graft.interrupt_until("leaves.\n\ntiny> ")
        graft.type("/exit")
        assert graft.wait() == 0
        assert "Traceback" not in graft.errors()
