"""The example scripts run on tiny models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.parity.oracle import make_even_adapter
from tests.parity.quantized_bases import FORMATS
from tests.tiny import make_llama

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str | Path) -> dict[str, str]:
    """What it prints, by what stands before the colon."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_qlora_serves_three_adapters_and_the_base_beside_each_other(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    names = ("first", "second", "third")
    adapters = [f"{name}={make_even_adapter(base, tmp_path / name, seed=seed)}" for seed, name in enumerate(names)]
    answers = run_example("qlora.py", base, *adapters)
    assert list(answers) == ["base", *names, "without adapters"]
    assert answers["base"] == answers["without adapters"]
    assert len({answers[name] for name in ("base", *names)}) == 4


def test_gptq_lora_serves_an_adapter_beside_its_base(tmp_path: Path) -> None:
    made = FORMATS["gptq"](make_llama(tmp_path / "base"), tmp_path)
    answers = run_example("gptq_lora.py", made.quantized, make_even_adapter(made.exact, tmp_path / "adapter"))
    assert list(answers) == ["base", "adapter"]
    assert answers["base"] != answers["adapter"]
