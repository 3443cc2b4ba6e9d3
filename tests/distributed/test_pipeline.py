"""Layers over several workers compute what one process does, whatever goes wrong. The workers are objects here."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graftlm import LLM, EngineConfig, SamplingParams
from graftlm.distributed.in_process import Fault, FaultKind
from graftlm.engine.engine import Engine
from graftlm.errors import (
    AdapterChanged,
    AdapterError,
    ConfigurationError,
    EngineClosed,
    ModelNotFound,
    StepFailed,
)
from tests.distributed.rig import (
    GREEDY,
    NUM_LAYERS,
    OPTIONS,
    answers,
    assert_nothing_is_held,
    assert_same_logits,
    open_pipeline,
    tokens,
)
from tests.parity import family_cases
from tests.parity.oracle import prompt_of
from tests.parity.test_growing_rope import CONFIGS
from tests.tiny import make_adapter, make_llama, make_model


@pytest.mark.parametrize(("workers", "layers"), [(1, ()), (2, ()), (3, ()), (2, (3, 1)), (3, (1, 1, 2))], ids=str)
def test_any_number_of_workers_answers_as_one_process(
    base: Path, adapters: dict[str, Path], local: LLM, workers: int, layers: Sequence[int]
) -> None:
    pipeline = open_pipeline(base, adapters, workers=workers, worker_layers=layers)
    assert_same_logits(pipeline.llm, local, list(adapters))
    assert tokens(answers(pipeline.llm, list(adapters))) == tokens(answers(local, list(adapters)))
    spans = [worker.layers for worker in pipeline.llm.workers]
    assert [stop - start for start, stop in spans] == list(layers) or not layers
    assert spans[0][0] == 0
    assert spans[-1][1] == NUM_LAYERS
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


def test_deterministic_workers_compute_the_bits_of_one_process(base: Path, adapters: dict[str, Path]) -> None:
    config = EngineConfig(model=base, adapters=adapters, deterministic=True, **OPTIONS)
    local, pipeline = LLM.over(Engine(config)), open_pipeline(base, adapters, deterministic=True)
    for name in (None, *adapters):
        ids = prompt_of(30, 99)
        assert torch.equal(pipeline.llm.logits(ids, adapter=name), local.logits(ids, adapter=name)), name
    with_logprobs = replace(GREEDY, logprobs=20)
    assert [output.outputs for output in answers(pipeline.llm, list(adapters), with_logprobs)] == [
        output.outputs for output in answers(local, list(adapters), with_logprobs)
    ]
    local.shutdown()


def test_a_tied_table_is_at_both_ends(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "tied", tied=True)
    adapters = {
        "ends": make_adapter(base, tmp_path / "ends", target_modules=["embed_tokens", "lm_head", "k_proj"]),
        "rows": make_adapter(base, tmp_path / "rows", trainable_token_indices=[5, 9, 258], scale=0.4),
    }
    local, pipeline = LLM(base, adapters=adapters, **OPTIONS), open_pipeline(base, adapters)
    assert_same_logits(pipeline.llm, local, ["ends"])
    assert tokens(answers(pipeline.llm, list(adapters))) == tokens(answers(local, list(adapters)))


@pytest.mark.parametrize("kind", ["windows", "longrope", "dynamic", "positions"])
def test_windows_and_rotary_angles_do_not_care_where_a_layer_is(tmp_path: Path, kind: str) -> None:
    configs: dict[str, Any] = {
        **CONFIGS,
        "windows": transformers.Gemma3TextConfig(**family_cases.GEMMA3),
        "positions": transformers.GPT2Config(**family_cases.SMALL_GPT),
    }
    base = make_model(tmp_path / "base", configs[kind])
    target = {"longrope": "qkv_proj", "positions": "c_attn"}.get(kind, "q_proj")
    adapters = {
        "tuned": make_adapter(base, tmp_path / "tuned", target_modules=[target], fan_in_fan_out=kind == "positions")
    }
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    local, pipeline = LLM(base, adapters=adapters, **OPTIONS), open_pipeline(base, adapters)
    assert tokens(answers(pipeline.llm, ["tuned"], params)) == tokens(answers(local, ["tuned"], params))
    assert_same_logits(pipeline.llm, local, ["tuned"])


def test_a_quantised_base_is_quantised_on_every_worker(base: Path, adapters: dict[str, Path]) -> None:
    names = ["plain", "dora"]
    chosen = {name: adapters[name] for name in names}
    local = LLM(base, adapters=chosen, quantization="nf4", **OPTIONS)
    pipeline = open_pipeline(base, chosen, quantization="nf4")
    assert_same_logits(pipeline.llm, local, names)
    assert tokens(answers(pipeline.llm, names)) == tokens(answers(local, names))


def test_each_worker_finds_what_it_quantised_at_the_last_start(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, logger="graftlm.models")
    first = open_pipeline(base, {}, quantization="nf4")
    assert caplog.text.count("(0 of them from the cache)") == 2
    caplog.clear()
    second = open_pipeline(base, {}, quantization="nf4")
    # Seven of each of two layers.
    assert caplog.text.count("(14 of them from the cache)") == 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert tokens(answers(second.llm, [])) == tokens(answers(first.llm, []))


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", ["die", "freeze", "drop", "delay", "duplicate"])
def test_a_fault_costs_no_token_and_leaks_nothing(
    base: Path, adapters: dict[str, Path], local: LLM, kind: FaultKind, stage: int
) -> None:
    # During the first prompt, among prompts and decodes, and near the end as soon as all is computed anew; two steps
    # are in flight each time.
    steps = [1, 6, 12, 14]
    names = ["plain", "dora", "late"]
    faults = [Fault(kind=kind, stage=stage, at=step) for step in steps]
    pipeline = open_pipeline(base, {name: adapters[name] for name in names}, faults)
    num_free_blocks = pipeline.llm.num_free_blocks
    outputs = answers(pipeline.llm, names)
    assert tokens(outputs) == tokens(answers(local, names))
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert pipeline.pool.pending_faults == []
    assert pipeline.pool.num_taken == 2 + (0 if kind == "duplicate" else len(steps))
    assert_nothing_is_held(pipeline, num_free_blocks)


def test_both_workers_may_die_and_one_again_while_all_is_computed_anew(
    base: Path, adapters: dict[str, Path], local: LLM
) -> None:
    faults = [Fault(kind="die", stage=stage, at=step) for stage, step in ((0, 4), (2, 5), (0, 7), (2, 7))]
    pipeline = open_pipeline(base, adapters, faults)
    assert tokens(answers(pipeline.llm, list(adapters))) == tokens(answers(local, list(adapters)))
    assert pipeline.pool.pending_faults == []


def test_drawn_tokens_and_prompt_log_probabilities_survive_too(
    base: Path, adapters: dict[str, Path], local: LLM
) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=7, n=2, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    faults = [Fault(kind="die", stage=2, at=step) for step in (2, 9)]
    ours = answers(open_pipeline(base, adapters, faults).llm, ["plain"], params)
    for output, expected in zip(ours, answers(local, ["plain"], params), strict=True):
        assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in expected.outputs]
        assert [answer.text for answer in output.outputs] == [answer.text for answer in expected.outputs]
        assert output.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        assert [entry.token_id for entry in output.prompt_logprobs] == [
            entry.token_id for entry in expected.prompt_logprobs
        ]


def test_logits_outside_any_request_survive_too(base: Path, adapters: dict[str, Path], local: LLM) -> None:
    pipeline = open_pipeline(base, adapters, [Fault(kind="die", stage=2, at=2)])
    assert_same_logits(pipeline.llm, local, ["plain"])


def test_a_lost_workers_blocks_are_not_taken_from_the_prefix_cache(
    base: Path, adapters: dict[str, Path], local: LLM
) -> None:
    pipeline = open_pipeline(base, adapters, [Fault(kind="die", stage=2, at=12)])
    request = {"prompt_token_ids": list(range(64))}
    outputs = [pipeline.llm.generate([request], GREEDY)[0] for _ in range(3)]
    assert tokens(outputs) == tokens(local.generate([request], GREEDY)) * 3
    # The second finds what the first left until its worker dies; the third finds what the second computed anew.
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 48]


def test_workers_that_die_in_every_step_end_the_request_with_an_error(base: Path, local: LLM) -> None:
    faults = [Fault(kind="die", stage=0, at=step) for step in range(1, 5)]
    pipeline = open_pipeline(base, {}, faults)
    num_free_blocks = pipeline.llm.num_free_blocks
    with pytest.raises(StepFailed) as failed:
        pipeline.llm.generate(["some text"], GREEDY)
    assert isinstance(failed.value.__cause__, EngineClosed)
    assert_nothing_is_held(pipeline, num_free_blocks)
    assert tokens(answers(pipeline.llm, [])) == tokens(answers(local, []))


def test_a_worker_has_only_adapters_that_concern_its_layers_until_they_are_unloaded(
    base: Path, adapters: dict[str, Path]
) -> None:
    pipeline = open_pipeline(base, adapters, worker_layers=(1, 2, 1), workers=3)
    assert [worker.adapters for worker in pipeline.llm.workers] == [(), (), ()]
    answers(pipeline.llm, ["late", "ends"])
    held = [set(worker.adapters) for worker in pipeline.llm.workers]
    assert held == [{"ends"}, {"ends"}, {"ends", "late"}]
    pipeline.llm.unload_adapter("ends")
    assert [worker.adapters for worker in pipeline.llm.workers] == [(), (), ("late",)]


def test_an_adapter_can_come_while_the_engine_runs_and_be_summed(base: Path, adapters: dict[str, Path]) -> None:
    chosen = {name: adapters[name] for name in ("plain", "late")}
    pipeline, local = open_pipeline(base, {}), LLM(base, adapters=chosen, **OPTIONS)
    answers(pipeline.llm, [])
    for name, path in chosen.items():
        pipeline.llm.load_adapter(name, path)
    names = ["plain", "plain:0.7+late:-0.5"]
    assert tokens(answers(pipeline.llm, names)) == tokens(answers(local, names))
    assert_same_logits(pipeline.llm, local, names)


def test_what_each_stage_has_done_is_counted_and_so_are_losses(base: Path, adapters: dict[str, Path]) -> None:
    chosen = {name: adapters[name] for name in ("plain", "late")}
    pipeline = open_pipeline(base, chosen, [Fault(kind="die", stage=2, at=3)])
    answers(pipeline.llm, list(chosen))
    first, second = (worker.work for worker in pipeline.llm.workers)
    assert first is not None
    assert second is not None
    assert first.num_steps > second.num_steps > 8
    assert min(first.compute_seconds, second.compute_seconds, first.idle_seconds, first.hop_bytes) > 0
    assert 0 < first.adapter_bytes < second.adapter_bytes
    assert pipeline.llm.num_lost_workers == 1


@pytest.mark.parametrize("victims", [(1, 5), (2, 9)])
def test_r106_r107_a_worker_that_has_no_adapter_yet_gets_it_before_it_computes(
    base: Path, adapters: dict[str, Path], local: LLM, victims: tuple[int, int]
) -> None:
    """Workers that are new know no adapter; twenty requests for one all get its answer, and not the base's."""
    pipeline = open_pipeline(base, {"plain": adapters["plain"]}, [Fault(kind="die", stage=0, at=at) for at in victims])
    prompts = [{"prompt_token_ids": list(prompt_of(9, seed))} for seed in range(20)]
    ours = tokens(pipeline.llm.generate(prompts, GREEDY, adapter="plain"))
    assert ours == tokens(local.generate(prompts, GREEDY, adapter="plain"))
    assert ours != tokens(local.generate(prompts, GREEDY))
    assert [worker.adapters for worker in pipeline.llm.workers] == [("plain",), ("plain",)]


def test_r110_a_broken_adapter_is_refused_with_its_reason_and_has_no_name(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Its requests are not the base's: there is no such model."""
    broken = make_adapter(base, tmp_path / "broken")
    weights = broken / "adapter_model.safetensors"
    save_file({name: tensor[..., 1:].contiguous() for name, tensor in load_file(weights).items()}, weights)
    pipeline = open_pipeline(base, {"plain": adapters["plain"]})
    with pytest.raises(AdapterError, match=r"adapter broken: .*lora_"):
        pipeline.llm.load_adapter("broken", broken)
    assert set(pipeline.llm.adapters) == {"plain"}
    with pytest.raises(ModelNotFound):
        answers(pipeline.llm, ["broken"])


def test_two_names_of_the_same_files_are_one_adapter_to_the_workers(base: Path, adapters: dict[str, Path]) -> None:
    pipeline = open_pipeline(base, {"one": adapters["plain"], "two": adapters["plain"]})
    first = tokens(answers(pipeline.llm, ["one", "two"]))
    pipeline.llm.unload_adapter("two")
    assert tokens(answers(pipeline.llm, ["one"]))[1] == first[1]


def test_an_unknown_adapter_is_refused_before_anything_is_computed(base: Path, adapters: dict[str, Path]) -> None:
    pipeline = open_pipeline(base, adapters, [Fault(kind="die", stage=0, at=1)])
    with pytest.raises(ModelNotFound):
        answers(pipeline.llm, ["plain", "unheard-of"])
    assert len(pipeline.pool.pending_faults) == 1
    assert {worker.adapters for worker in pipeline.llm.workers} == {()}


def test_files_that_changed_meanwhile_are_refused_and_others_go_on(
    base: Path, adapters: dict[str, Path], local: LLM, tmp_path: Path
) -> None:
    shutil.copytree(adapters["plain"], tmp_path / "copy")
    pipeline = open_pipeline(base, {"copy": tmp_path / "copy", "late": adapters["late"]})
    num_free_blocks = pipeline.llm.num_free_blocks
    weights = tmp_path / "copy" / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(AdapterChanged, match="adapter copy: its files have changed since it was loaded"):
        answers(pipeline.llm, ["copy"])
    with pytest.raises(AdapterChanged):
        pipeline.llm.logits([1, 2, 3], adapter="copy")
    assert_nothing_is_held(pipeline, num_free_blocks)
    assert tokens(answers(pipeline.llm, ["late"])) == tokens(answers(local, ["late"]))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"workers": 5}, "more workers than layers"),
        ({"workers": 0}, "workers must be a positive integer"),
        ({"worker_layers": (4,)}, "worker_layers does not fit workers"),
        ({"worker_layers": (1, 2)}, "does not add up"),
        ({"workers": None, "ray_address": "auto"}, "ray_address is about workers"),
        ({"workers": None, "rebalance": True}, "rebalance is about workers"),
        ({"worker_layers": (1, 3), "rebalance": True}, "worker_layers says how many layers each worker has, and rebal"),
        ({"workers": None, "activation_journal": False}, "without workers there is no activation_journal"),
        ({"worker_timeout_seconds": 0}, "worker_timeout_seconds must be positive"),
        ({"device": "cuda"}, "workers compute on the CPU"),
    ],
)
def test_what_workers_cannot_do_is_refused(base: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        open_pipeline(base, {}, **options)
