"""Figures of runs whose times are written down."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from graftlm.config import EngineConfig
from graftlm.engine.base import load_base
from graftlm.models.decoder import Decoder
from graftlm.workload import (
    FIGURES,
    Figures,
    MachineLimits,
    ModelCost,
    Step,
    Workload,
    WorkloadRun,
    measure_limits,
    median_figures,
    summarize,
)
from tests.tiny import make_model

LIMITS = MachineLimits(bytes_per_second=1000.0, flops=500.0)
COST = ModelCost(weight_bytes=40, num_layer_weights=20, num_head_weights=6, kv_bytes=(2, 1), windows=(None, 3))
# Two requests of three prompt tokens; the second's prompt is computed beside the first's second token.
RUN = WorkloadRun(
    workload=Workload(num_requests=2, prompt_tokens=3, output_tokens=3),
    steps=(
        Step(seconds=1.0, prompt_rows=3, decode_rows=0, contexts=(3,)),
        Step(seconds=2.0, prompt_rows=3, decode_rows=1, contexts=(4, 3)),
        Step(seconds=0.5, prompt_rows=0, decode_rows=2, contexts=(5, 4)),
        Step(seconds=0.25, prompt_rows=0, decode_rows=1, contexts=(5,)),
    ),
    token_times=((1.0, 3.0, 3.5), (3.0, 3.5, 3.75)),
    token_ids=((1, 2, 3), (4, 5, 6)),
)


def test_figures_are_what_the_times_say() -> None:
    figures = summarize(RUN, limits=LIMITS, cost=COST, adapter_bytes=8, adapter_weights=2)
    assert figures.output_tokens_per_second == 6 / 3.75
    assert figures.prompt_tokens_per_second == 6 / 3
    assert figures.decode_tokens_per_second == 3 / 0.75
    assert figures.first_token_seconds == 2.0
    assert figures.inter_token_p50_seconds == 0.5
    # Of 0.25, 0.5, 0.5 and 2.0, with linear interpolation.
    assert figures.inter_token_p95_seconds == pytest.approx(0.5 + 0.85 * 1.5)
    assert figures.prompt_step_seconds == 1.5
    assert figures.decode_step_seconds == 0.375
    # Weights and adapters in both steps; all of the context in the first group, three tokens in the second.
    read = 2 * (40 + 8) + 2 * (5 + 4 + 5) + 1 * (3 + 3 + 3)
    assert figures.decode_bandwidth_share == pytest.approx(read / 0.75 / 1000)
    assert figures.decode_flops_share == pytest.approx(2 * (3 * 22 + 3 * 6) / 0.75 / 500)
    assert figures.prompt_flops_share == pytest.approx(2 * (7 * 22 + 3 * 6) / 3 / 500)


def test_what_did_not_happen_has_no_figure() -> None:
    once = replace(RUN, steps=RUN.steps[:1], token_times=((1.0,),))
    figures = summarize(once, limits=LIMITS)
    absent = {field.name for field in fields(Figures) if getattr(figures, field.name) is None}
    assert absent == {
        "decode_tokens_per_second", "inter_token_p50_seconds", "inter_token_p95_seconds", "decode_step_seconds",
        "decode_bandwidth_share", "decode_flops_share", "prompt_flops_share",
    }  # fmt: skip


def test_medians_are_of_each_figure_alone() -> None:
    one = summarize(RUN, limits=LIMITS)
    runs = [
        replace(one, first_token_seconds=1.0, prompt_tokens_per_second=9.0),
        replace(one, first_token_seconds=5.0, prompt_tokens_per_second=8.0),
        replace(one, first_token_seconds=2.0, prompt_tokens_per_second=1.0),
    ]
    medians = median_figures(runs)
    assert (medians.first_token_seconds, medians.prompt_tokens_per_second) == (2.0, 8.0)
    assert medians.decode_bandwidth_share is None
    assert median_figures([one]) == one


def test_every_figure_is_shown() -> None:
    assert {figure.name for figure in FIGURES} == {field.name for field in fields(Figures)}


def decoder_of(folder: Path, dtype: str) -> Decoder:
    return load_base(EngineConfig(model=folder, dtype=dtype)).decoder  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_cost_counts_the_matrices_transformers_has(llama: Path, dtype: str, size: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    head = linears.pop("lm_head").weight.numel()
    layers = sum(module.weight.numel() for module in linears.values())
    cost = ModelCost.of(decoder_of(llama, dtype))
    assert cost is not None
    assert (cost.num_layer_weights, cost.num_head_weights) == (layers, head)
    # Rows are laid out in tiles, the last of which may be padded.
    assert 1 <= cost.weight_bytes / (size * (layers + head)) < 1.1
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    assert cost.kv_bytes == (2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * size,)
    assert cost.windows == (None,)


def test_a_mixture_of_experts_has_no_cost(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, max_position_embeddings=64,
    )  # fmt: skip
    assert ModelCost.of(decoder_of(make_model(tmp_path / "moe", config), "float32")) is None


def test_limits_are_measured_and_the_best_is_kept() -> None:
    measured = measure_limits(torch.device("cpu"), torch.float32, read_bytes=1 << 20, matrix_size=64)
    assert measured.bytes_per_second > 0
    assert measured.flops > 0
    assert LIMITS.best(MachineLimits(bytes_per_second=2000.0, flops=1.0)) == MachineLimits(
        bytes_per_second=2000.0, flops=500.0
    )
