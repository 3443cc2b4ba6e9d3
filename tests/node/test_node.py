"""The `openai` package for Node, asked by its own test runner: `make node-test`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from graftlm import AsyncLLM
from tests.server.live_server import serving
from tests.server.scripted import make_scripted
from tests.tiny import make_adapter

HERE = Path(__file__).parent
TEMPLATE = "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1]['content'] }}{# <tool_call> #}{# tools #}"
SCRIPTS = {
    "text": "It rains, naïvely 🙂.",
    "calls": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
}


def test_the_client_for_node_reads_every_reply(tmp_path: Path) -> None:
    prompts = make_scripted(tmp_path / "base", SCRIPTS)
    (tmp_path / "base" / "chat_template.jinja").write_text(TEMPLATE)
    twin = make_adapter(tmp_path / "base", tmp_path / "twin", target_modules=["c_attn"], fan_in_fan_out=True)
    llm = AsyncLLM(tmp_path / "base", name="base", adapters={"twin": twin}, kv_cache_bytes=64 << 20)
    with serving(llm) as live:
        told = {"url": live.url, "models": ["base", "twin"], "prompts": prompts, "scripts": SCRIPTS}
        subprocess.run(
            ["node", "--test", "--test-reporter=spec"],
            cwd=HERE,
            env={**os.environ, "GRAFT_TEST": json.dumps(told)},
            check=True,
            timeout=200,
        )
