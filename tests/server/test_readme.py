"""The README's example of the `openai` client, run as it stands there against a server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from graftlm import AsyncLLM
from tests.server.conftest import Files
from tests.server.live_server import serving

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "http://127.0.0.1:8000/v1"


def test_the_readmes_client_works_by_copy_and_paste(files: Files) -> None:
    [code] = [code for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if ADDRESS in code]
    llm = AsyncLLM(files.base, name="tiny", adapters={"legal": files.red}, kv_cache_bytes=1 << 20, max_model_len=128)
    with serving(llm) as live:
        names: dict[str, Any] = {}
        exec(code.replace(ADDRESS, f"{live.url}/v1"), names)
        # The example prints what came back.
        assert names["completion"].choices[0].message.content
        assert names["completion"].model == "legal"
