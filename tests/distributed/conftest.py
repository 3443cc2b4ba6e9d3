"""A base of four layers, loud adapters of many kinds, and the one-process engine that all answers are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest

from graftlm import LLM
from tests.distributed.rig import NUM_LAYERS, OPTIONS
from tests.parity import method_rig
from tests.tiny import ALL_PROJECTIONS, make_adapter, make_llama


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("deep") / "llama", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Low-rank and not, at both ends, in some layers only, and with tensors that all layers share (VeRA)."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {
        "plain": make_adapter(base, folder / "plain", seed=1),
        "dora": make_adapter(
            base, folder / "dora", seed=2, r=3, use_dora=True, target_modules=[*ALL_PROJECTIONS, "lm_head"]
        ),
        "ends": make_adapter(
            base, folder / "ends", seed=3, r=5, target_modules=["embed_tokens", "o_proj"], modules_to_save=["lm_head"]
        ),
        "late": make_adapter(
            base, folder / "late", seed=4, r=16, target_modules=ALL_PROJECTIONS, layers_to_transform=[NUM_LAYERS - 1]
        ),
    }
    configs: dict[str, peft.PeftConfig] = {
        "ia3": peft.IA3Config(task_type="CAUSAL_LM"),
        "vera": peft.VeraConfig(task_type="CAUSAL_LM", r=6, target_modules=["q_proj", "v_proj"], d_initial=1.0),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        "oft": peft.OFTConfig(task_type="CAUSAL_LM", r=0, oft_block_size=8, target_modules=["q_proj", "down_proj"]),
    }
    return made | {name: method_rig.make_adapter(base, folder / name, config) for name, config in configs.items()}


@pytest.fixture(scope="session")
def local(base: Path, adapters: dict[str, Path]) -> LLM:
    return LLM(base, adapters=adapters, **OPTIONS)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One Ray cluster on the loopback address, which engines find and leave."""
    # Before Ray is imported, which reads it then.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()
