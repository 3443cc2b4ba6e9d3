"""What a batch does not use costs it nothing: plain LoRA rows run the same operations whatever else is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
from torch.utils._python_dispatch import TorchDispatchMode

from graftlm import LLM
from tests.engine.rig import BLOCK_BYTES, greedy, prompt
from tests.parity.method_rig import make_adapter as make_method_adapter
from tests.tiny import make_adapter


class Recorder(TorchDispatchMode):
    """Every operation torch runs, with the shapes it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(f"{func} {[tuple(arg.shape) for arg in args if hasattr(arg, 'shape')]}")
        return func(*args, **(kwargs or {}))


def operations(llm: LLM, names: list[str | None]) -> list[str]:
    with Recorder() as recorder:
        llm.generate([prompt(9 + index) for index in range(len(names))], greedy(4, ignore_eos=True), adapter=names)
    return recorder.operations


def test_plain_rows_run_the_same_operations_beside_adapters_of_other_kinds(
    llama: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    plain = {name: adapters[name] for name in ("red", "green")}
    llm = LLM(llama, adapters=plain, kv_cache_bytes=64 * BLOCK_BYTES, prefix_cache=False)
    names: list[str | None] = ["red", None, "green", "red"]
    # Played back are steps that came before, after the first of all.
    for _ in range(3):
        before = operations(llm, names)
    others = {
        "dora": make_adapter(llama, tmp_path / "dora", use_dora=True),
        "rows": make_adapter(llama, tmp_path / "rows", trainable_token_indices=[5, 9]),
        "saved": make_adapter(llama, tmp_path / "saved", modules_to_save=["lm_head", "norm"]),
        "invoked": make_adapter(llama, tmp_path / "invoked", alora_invocation_tokens=[17, 18]),
        "scales": make_method_adapter(llama, tmp_path / "scales", peft.IA3Config(task_type="CAUSAL_LM")),
        "prompt": make_method_adapter(
            llama, tmp_path / "prompt", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        ),
    }
    for name, path in others.items():
        llm.load_adapter(name, path)
    assert operations(llm, names) == before
    assert operations(llm, ["dora", None, "rows", "scales"]) != before
    llm.shutdown()
