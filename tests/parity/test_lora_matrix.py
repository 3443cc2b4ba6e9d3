"""Every LoRA variant PEFT can save over a Llama, alone and all together, against PEFT's own reading of the files.

The oracle is each adapter alone over a fresh base: PEFT's mixed batches are wrong for most of these (PEFT.md §4).
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from graftlm import LLM, SamplingParams
from graftlm.adapters import load_adapter
from graftlm.checkpoint import open_checkpoint
from graftlm.errors import AdapterCorrupt, AdapterError, AdapterIncompatible, AdapterUnsupported, InvalidRequest
from graftlm.kernels.ops import LoraExpand, LoraUpdate
from graftlm.layers.linear import apply_patches
from graftlm.layers.patch import LinearPatch, PartTransform
from graftlm.layers.transforms import Affine
from graftlm.models.base_weights import CheckpointWeights
from tests.parity.lora_cases import (
    CASES,
    CONFIG,
    INVOCATION,
    VOCAB,
    WEIGHTS,
    Case,
    make_bases,
    make_case,
    open_base,
    reload,
    rewrite,
    role_of,
)
from tests.tiny import edit_json

# PEFT warns of nearly everything that is done here.
pytestmark = pytest.mark.filterwarnings("ignore")

LOUD = 1e-2
NUM_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
# Holds every token the cases single out, and an activated LoRA's invocation in its middle.
PROMPT = [5, 9, 200, 40, *INVOCATION, 33, 60, 7]
ENGINE: dict[str, Any] = {"kv_cache_bytes": 8 << 20, "allow_pickle": True}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What PEFT answers: logits of the prompt's positions, then greedy tokens and their log-probabilities."""

    prompt: list[int]
    logits: Tensor
    token_ids: tuple[int, ...]
    logprobs: list[float]


@torch.no_grad()
def reference(model: Any, prompt: Sequence[int]) -> Reference:
    # generate, not a loop of forward passes: those would look for an invocation in the new token alone.
    ids = torch.tensor([list(prompt)])
    answer = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    token_ids = tuple(answer.sequences[0, len(prompt) :].tolist())
    logprobs = [
        float(logits[0].log_softmax(-1)[token_id]) for logits, token_id in zip(answer.logits, token_ids, strict=True)
    ]
    return Reference(prompt=list(prompt), logits=model(input_ids=ids).logits[0], token_ids=token_ids, logprobs=logprobs)


class Bench:
    """Bases, adapters and references, made when first asked for and kept for all tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bases = make_bases(folder)
        self._models = {name: open_base(path) for name, path in self.bases.items()}
        self._paths: dict[str, Path] = {}
        self._references: dict[str, Reference] = {}
        self._llms: dict[str, LLM] = {}

    def fresh(self, base: str) -> Any:
        return copy.deepcopy(self._models[base])

    def path(self, name: str) -> Path:
        if name not in self._paths:
            case = CASES[name]
            self._paths[name] = make_case(name, case, self.fresh(case.base), self.folder / name)
        return self._paths[name]

    def oracle(self, name: str) -> Any:
        case = CASES[name]
        return reload(self.fresh(case.base), self.path(name), case.resize)

    def reference(self, name: str) -> Reference:
        """Of a case, or of a base under its own name."""
        if name not in self._references:
            model = self.fresh(name) if name in self.bases else self.oracle(name)
            self._references[name] = reference(model, PROMPT if name in self.bases else prompt_of(CASES[name]))
        return self._references[name]

    def llm(self, base: str) -> LLM:
        """With no adapter, to leave as it was found."""
        if base not in self._llms:
            self._llms[base] = LLM(self.bases[base], **ENGINE)
        return self._llms[base]

    def cases(self, base: str) -> list[str]:
        return [name for name, case in CASES.items() if case.base == base]


def prompt_of(case: Case) -> list[int]:
    """With the ids only this adapter knows, if there are any."""
    if case.resize is None or case.resize <= VOCAB:
        return PROMPT
    return [*PROMPT[:4], *case.config.get("alora_invocation_tokens", []), case.resize - 1, 33, VOCAB]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("matrix"))


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """Within tolerance over the adapter's vocabulary, impossible beyond it."""
    width = wanted.shape[1]
    assert got.shape[1] >= width
    assert (got[:, :width] - wanted).abs().max() <= 1e-4 * (1 + wanted.abs().max())
    assert (got[:, width:] == -torch.inf).all()


def moved(one: Tensor, other: Tensor) -> float:
    rows, width = min(len(one), len(other)), min(one.shape[1], other.shape[1])
    return float((one[:rows, :width] - other[:rows, :width]).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_peft(name: str, bench: Bench) -> None:
    wanted, llm = bench.reference(name), bench.llm(CASES[name].base)
    llm.load_adapter(name, bench.path(name))
    try:
        got = llm.logits(wanted.prompt, adapter=name)
        (output,) = llm.generate({"prompt_token_ids": wanted.prompt}, PARAMS, adapter=name)
    finally:
        llm.unload_adapter(name)
    assert_same(got, wanted.logits)
    assert output.outputs[0].token_ids == wanted.token_ids
    assert moved(wanted.logits[:4], llm.logits(PROMPT[:4])) > LOUD or "alora" in name
    assert moved(wanted.logits[4:], llm.logits(PROMPT)[4:]) > LOUD


# Cases that between them hold every role of tensor; in each, every role is halved in turn.
WITH_ALL_ROLES = [
    "01_query_value",
    "49_dora_ends_rslora",
    "52_bias_all_dora",
    "53_bias_lora_only",
    "55_lora_bias",
    "58_saved_ends",
    "59_saved_norms",
    "59_saved_mlp",
    "60_ends_tied",
    "61_tokens_both_ends",
    "61_tokens_both_ends_tied",
    "62_grown_trained",
    "62_grown_trained_tied",
    "62_shrunk_head",
    "63_grown_tokens",
    "65_alora_with_all",
    "67_olora",
    "67_pissa_dora",
    "70_kasa",
]


@pytest.mark.parametrize("name", WITH_ALL_ROLES)
def test_every_part_of_an_adapter_counts_as_in_peft(name: str, bench: Bench, tmp_path: Path) -> None:
    case, whole = CASES[name], bench.reference(name)
    llm = bench.llm(case.base)
    tensors = load_file(bench.path(name) / WEIGHTS)
    shutil.copytree(bench.path(name), tmp_path / "halved")
    # Both copies of a tied matrix are one tensor to PEFT.
    roles = {n: role_of(n).split(".", 1)[-1] if case.base == "tied" else role_of(n) for n in tensors}
    for role in sorted(set(roles.values())):
        halved = {n: t * (0.5 if roles[n] == role else 1) for n, t in tensors.items()}
        rewrite(tmp_path / "halved" / WEIGHTS, lambda _, halved=halved: halved)
        with torch.no_grad():
            model = reload(bench.fresh(case.base), tmp_path / "halved", case.resize)
            wanted = model(torch.tensor([whole.prompt])).logits[0]
        assert moved(wanted, whole.logits) > LOUD, f"PEFT does not notice {role}"
        llm.load_adapter("halved", tmp_path / "halved")
        try:
            assert_same(llm.logits(whole.prompt, adapter="halved"), wanted)
        finally:
            llm.unload_adapter("halved")


def answers(llm: LLM, bench: Bench, names: Sequence[str], base: str) -> None:
    """One batch over these cases (the base under its own name), each row checked against its own reference."""
    wanted = [bench.reference(name) for name in names]
    outputs = llm.generate(
        [{"prompt_token_ids": each.prompt} for each in wanted],
        PARAMS,
        adapter=[None if name == base else name for name in names],
    )
    for name, output, each in zip(names, outputs, wanted, strict=True):
        (answer,) = output.outputs
        assert answer.token_ids == each.token_ids, name
        got = [token.logprob for token in answer.logprobs or ()]
        assert got == pytest.approx(each.logprobs, abs=1e-3), name


@pytest.mark.parametrize("base", ["untied", "tied", "biased"])
def test_all_adapters_of_a_base_share_one_batch_and_the_base_is_untouched(base: str, bench: Bench) -> None:
    names = bench.cases(base)
    # Chunks of three tokens and room for a fifth of the rows: they begin, decode and end at different steps.
    llm = LLM(bench.bases[base], prefill_chunk_tokens=3, max_num_batched_tokens=24, max_num_seqs=12, **ENGINE)
    before = llm.logits(PROMPT)
    random.Random(0).shuffle(names)
    for name in names:
        llm.load_adapter(name, bench.path(name))
    during = llm.logits(PROMPT)
    rows = [*names, *names[:5], *[base] * 6]
    for seed in range(2):
        random.Random(seed).shuffle(rows)
        answers(llm, bench, rows, base)
    after_use = llm.logits(PROMPT)
    for name in names:
        llm.unload_adapter(name)
    for logits in (during, after_use, llm.logits(PROMPT)):
        assert torch.equal(logits, before)
    answers(llm, bench, [base], base)
    llm.shutdown()


def test_r057_saved_modules_do_not_depend_on_the_order_of_loading(bench: Bench) -> None:
    names = ["56_saved_head", "57_saved_embedding", "59_saved_norms", "62_grown_trained", "67_pissa"]
    seen: list[list[Tensor]] = []
    for order in (names, names[::-1]):
        llm = LLM(bench.bases["untied"], **ENGINE)
        for name in order:
            llm.load_adapter(name, bench.path(name))
        seen.append([llm.logits(bench.reference(name).prompt, adapter=name) for name in names])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("base", ["untied", "tied", "biased"])
def test_adapters_that_come_and_go_in_any_order_leave_every_row_right(base: str, bench: Bench, data: Any) -> None:
    llm, names = bench.llm(base), bench.cases(base)
    before = llm.logits(PROMPT)
    try:
        for _ in range(data.draw(st.integers(1, 4), label="rounds")):
            loaded = sorted(llm.adapters)
            for name in data.draw(st.lists(st.sampled_from(loaded), unique=True), label="unload") if loaded else []:
                llm.unload_adapter(name)
            absent = sorted(set(names) - llm.adapters.keys())
            for name in data.draw(st.lists(st.sampled_from(absent), unique=True, max_size=5), label="load"):
                llm.load_adapter(name, bench.path(name))
            answers(llm, bench, data.draw(st.permutations([base, *llm.adapters]), label="rows"), base)
    finally:
        for name in llm.adapters:
            llm.unload_adapter(name)
    assert torch.equal(llm.logits(PROMPT), before)


def test_one_adapter_under_two_names_may_lose_one(bench: Bench) -> None:
    llm, path = bench.llm("untied"), bench.path("47_dora")
    wanted = bench.reference("47_dora")
    llm.load_adapter("one", path)
    llm.load_adapter("two", path)
    for names in (["one", None, "two"], ["two"]):
        for output, name in zip(
            llm.generate([{"prompt_token_ids": PROMPT}] * len(names), PARAMS, adapter=names), names, strict=True
        ):
            assert output.outputs[0].token_ids == (wanted if name else bench.reference("untied")).token_ids
        llm.unload_adapter(names[0] or "")
    assert not llm.adapters


@pytest.mark.parametrize("base", ["untied", "tied"])
def test_r020_new_tokens_are_their_adapters_alone(base: str, bench: Bench) -> None:
    llm = bench.llm(base)
    grown = [name for name in bench.cases(base) if (CASES[name].resize or 0) > VOCAB]
    plain = next(name for name in bench.cases(base) if CASES[name].resize is None)
    for name in (*grown, plain):
        llm.load_adapter(name, bench.path(name))
    try:
        for name in (None, plain):
            for bad in ([1, VOCAB], [1, -1], [299]):
                with pytest.raises(InvalidRequest, match=f"0 to {VOCAB - 1}"):
                    llm.generate({"prompt_token_ids": bad}, PARAMS, adapter=name)
            with pytest.raises(InvalidRequest, match="logit_bias"):
                llm.generate("x", SamplingParams(logit_bias={VOCAB: 50.0}), adapter=name)
        for name in grown:
            size = CASES[name].resize or 0
            with pytest.raises(InvalidRequest, match=f"0 to {size - 1}"):
                llm.generate({"prompt_token_ids": [size]}, PARAMS, adapter=name)
        # All at once, the new ones pushed towards their own last token, the others as random as can be.
        push = [SamplingParams(max_tokens=6, logit_bias={(CASES[n].resize or 0) - 1: 100.0}) for n in grown]
        wild = SamplingParams(max_tokens=200, temperature=2.0, ignore_eos=True, seed=0, logprobs=1)
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPT}] * (len(grown) + 3),
            [*push, wild, wild, wild],
            adapter=[*grown, None, plain, None],
        )
        for name, output in zip(grown, outputs, strict=False):
            assert set(output.outputs[0].token_ids) == {(CASES[name].resize or 0) - 1}
        for output in outputs[len(grown) :]:
            assert max(output.outputs[0].token_ids) < VOCAB
            assert output.outputs[0].token_ids != outputs[0].outputs[0].token_ids
    finally:
        for name in llm.adapters:
            llm.unload_adapter(name)


def test_r020_a_smaller_vocabulary_never_yields_a_token_beyond_it(bench: Bench) -> None:
    llm = bench.llm("untied")
    names = [name for name in bench.cases("untied") if (CASES[name].resize or VOCAB) < VOCAB]
    for name in names:
        llm.load_adapter(name, bench.path(name))
    try:
        for name in names:
            with pytest.raises(InvalidRequest, match="0 to 249"):
                llm.generate({"prompt_token_ids": [250]}, PARAMS, adapter=name)
            wild = SamplingParams(max_tokens=200, temperature=5.0, repetition_penalty=1.5, seed=1)
            (output,) = llm.generate({"prompt_token_ids": PROMPT}, wild, adapter=name)
            assert len(output.outputs[0].token_ids) == 200
            assert max(output.outputs[0].token_ids) < 250
    finally:
        for name in names:
            llm.unload_adapter(name)


ALORA_PROMPTS = {
    "none": [5, 9, 200, 40, 17, 33, 18, 60, 7],
    "only_its_first_token_at_the_end": [5, 9, 200, 40, 33, 17],
    "one": [5, 9, 200, *INVOCATION, 40, 33, 60],
    "at_the_start": [*INVOCATION, 5, 9, 200, 40],
    "at_the_end": [5, 9, 200, 40, 33, *INVOCATION],
    "nothing_else": [*INVOCATION],
    "two": [5, *INVOCATION, 9, 200, 40, *INVOCATION, 33, 60, 7],
    "two_in_a_row": [5, 9, *INVOCATION, *INVOCATION, 40],
}


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_activated_adapters_start_at_their_last_invocation_in_any_chunks(bench: Bench, chunk: int) -> None:
    names = ["65_alora", "65_alora_lora_bias", "02_rank_8", None]
    llm = LLM(bench.bases["untied"], prefill_chunk_tokens=chunk, **ENGINE)
    rows = []
    for name in names:
        model = bench.fresh("untied") if name is None else bench.oracle(name)
        rows += [(name, label, _alora_reference(bench, name, label, model)) for label in ALORA_PROMPTS]
        if name is not None:
            llm.load_adapter(name, bench.path(name))
    random.Random(chunk).shuffle(rows)
    outputs = llm.generate(
        [{"prompt_token_ids": wanted.prompt} for *_, wanted in rows], PARAMS, adapter=[name for name, *_ in rows]
    )
    for output, (name, label, wanted) in zip(outputs, rows, strict=True):
        assert output.outputs[0].token_ids == wanted.token_ids, (name, label)
        logprobs = [token.logprob for token in output.outputs[0].logprobs or ()]
        assert logprobs == pytest.approx(wanted.logprobs, abs=1e-3), (name, label)
    for name, label, wanted in rows:
        assert_same(llm.logits(wanted.prompt, adapter=name), wanted.logits)
        dormant = (wanted.logits - llm.logits(wanted.prompt)).abs().amax(dim=1) < 1e-4
        if name == "65_alora":
            start = {
                "none": 9,
                "only_its_first_token_at_the_end": 6,
                "one": 3,
                "at_the_end": 5,
                "two": 6,
                "two_in_a_row": 4,
            }
            assert dormant.tolist() == [position < start.get(label, 0) for position in range(len(wanted.prompt))]


_ALORA: dict[tuple[str | None, str], Reference] = {}


def _alora_reference(bench: Bench, name: str | None, label: str, model: Any) -> Reference:
    if (name, label) not in _ALORA:
        _ALORA[name, label] = reference(model, ALORA_PROMPTS[label])
    return _ALORA[name, label]


BF16 = ["02_rank_64", "47_dora", "49_dora_ends_rslora", "55_lora_bias", "60_embedding", "62_grown_trained", "67_pissa"]


@pytest.mark.parametrize("name", BF16)
def test_a_bf16_base_is_as_close_to_float32_as_peft_is(name: str, bench: Bench) -> None:
    case = CASES[name]
    llm = LLM(bench.bases[case.base], dtype="bfloat16", adapters={name: bench.path(name)}, **ENGINE)
    model = reload(bench.fresh(case.base).to(torch.bfloat16), bench.path(name), case.resize)
    generator = torch.Generator().manual_seed(0)
    exact, theirs, ours = [], [], []
    for _ in range(8):
        ids = torch.randint(0, VOCAB, (48,), generator=generator).tolist()
        with torch.no_grad():
            exact.append(bench.oracle(name)(torch.tensor([ids])).logits[0])
            theirs.append(model(torch.tensor([ids])).logits[0].float())
        ours.append(llm.logits(ids, adapter=name)[:, : exact[0].shape[1]])
    h32, h16, e16 = torch.cat(exact), torch.cat(theirs), torch.cat(ours)

    def distance(logits: Tensor) -> float:
        return float((logits - h32).norm() / h32.norm())

    def divergence(logits: Tensor) -> float:
        return float((h32.softmax(-1) * (h32.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean())

    # FAMILIES C16, tighter: the allowance of a quarter is for other orders of summation, which a bf16 product has.
    assert distance(e16) <= 1.15 * distance(h16) + 1e-3
    assert divergence(e16) <= 1.15 * divergence(h16) + 1e-4


def test_transforms_and_update_of_a_bf16_layer_are_rounded_once() -> None:
    torch.manual_seed(0)
    x, out = torch.randn(40, 24).bfloat16(), torch.randn(40, 32).bfloat16()
    scale, shift = torch.rand(32) + 0.5, torch.randn(32)
    shrink, expand = torch.randn(24, 4), torch.randn(4, 32)
    update = LoraUpdate(
        shrink=shrink, expands=(LoraExpand(matrix=expand, out_start=0, out_stop=32, rank_start=0, rank_stop=4),)
    )
    outputs = [
        PartTransform(out_start=0, out_stop=32, transform=Affine(scale=scale)),
        PartTransform(out_start=0, out_stop=32, transform=Affine(shift=shift)),
    ]
    got = out.clone()
    apply_patches(got, x, [(8, 40, LinearPatch(outputs=tuple(outputs), low_rank=update))])
    exact = out.double() * scale.double() + shift.double() + x.double() @ shrink.double() @ expand.double()
    assert (got[8:] == exact[8:].bfloat16()).double().mean() > 0.995
    assert torch.equal(got[:8], out[:8])


Tensors = dict[str, Tensor]
ATTENTION = "base_model.model.model.layers.0.self_attn."
EMBEDDING, HEAD, NORM = (
    "base_model.model.model.embed_tokens.",
    "base_model.model.lm_head.",
    "base_model.model.model.norm.",
)
MAGNITUDE = f"{ATTENTION}q_proj.lora_magnitude_vector"
ROWS = "token_adapter.trainable_tokens_delta"


def with_tensor(name: str, *shape: int) -> Any:
    return lambda tensors: {**tensors, name: torch.ones(shape)}


def without(*parts: str) -> Any:
    return lambda tensors: {name: t for name, t in tensors.items() if not any(part in name for part in parts)}


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A case's files with a change, and what the refusal says."""

    of: str
    config: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Tensors], Tensors] | None = None
    error: type[AdapterError]
    match: str


WRONG: dict[str, Wrong] = {
    "dora_flag_false": Wrong(
        of="47_dora", config={"use_dora": False}, error=AdapterUnsupported, match="lora_magnitude_vector"
    ),
    "dora_no_magnitudes": Wrong(
        of="47_dora", change=without("magnitude"), error=AdapterCorrupt, match="lora_magnitude_vector of .* is missing"
    ),
    "dora_flag_alone": Wrong(
        of="02_rank_8", config={"use_dora": True}, error=AdapterCorrupt, match="lora_magnitude_vector of .* is missing"
    ),
    "dora_one_magnitude_missing": Wrong(
        of="47_dora", change=without(MAGNITUDE), error=AdapterCorrupt, match=r"lora_magnitude_vector of .*0\..*q_proj"
    ),
    "dora_shape": Wrong(
        of="47_dora",
        change=with_tensor(MAGNITUDE, 32),
        error=AdapterIncompatible,
        match="lora_magnitude_vector of .*q_proj",
    ),
    "dora_embedding_shape": Wrong(
        of="49_dora_ends_rslora",
        change=with_tensor(f"{EMBEDDING}lora_magnitude_vector", 259),
        error=AdapterIncompatible,
        match=r"lora_magnitude_vector of model\.embed_tokens",
    ),
    "lora_bias_flag_false": Wrong(
        of="55_lora_bias", config={"lora_bias": False}, error=AdapterUnsupported, match=r"lora_B\.bias"
    ),
    "lora_bias_missing": Wrong(
        of="02_rank_8", config={"lora_bias": True}, error=AdapterCorrupt, match=r"lora_B\.bias of .* is missing"
    ),
    "lora_bias_shape": Wrong(
        of="55_lora_bias",
        change=with_tensor(f"{ATTENTION}v_proj.lora_B.bias", 64),
        error=AdapterIncompatible,
        match=r"lora_B\.bias of .*v_proj",
    ),
    "diagonal_without_kasa": Wrong(
        of="70_kasa", config={"kasa_config": None}, error=AdapterUnsupported, match="lora_diag"
    ),
    "kasa_without_diagonal": Wrong(
        of="70_kasa", change=without("lora_diag"), error=AdapterCorrupt, match="lora_diag of .* is missing"
    ),
    "diagonal_shape": Wrong(
        of="70_kasa",
        change=with_tensor(f"{ATTENTION}q_proj.lora_diag", 1),
        error=AdapterIncompatible,
        match="lora_diag of .*q_proj",
    ),
    "bias_of_a_module_without": Wrong(
        of="02_rank_8",
        config={"bias": "all"},
        change=with_tensor(f"{ATTENTION}q_proj.base_layer.bias", 64),
        error=AdapterIncompatible,
        match="q_proj has no bias in this base",
    ),
    "bias_of_a_norm": Wrong(
        of="52_bias_all",
        change=with_tensor(f"{NORM}bias", 64),
        error=AdapterIncompatible,
        match=r"model\.norm has no bias in this base",
    ),
    "bias_flag_none": Wrong(
        of="52_bias_all", config={"bias": "none"}, error=AdapterUnsupported, match=r"down_proj\.bias"
    ),
    "bias_shape": Wrong(
        of="52_bias_all",
        change=with_tensor(f"{ATTENTION}k_proj.bias", 64),
        error=AdapterIncompatible,
        match="bias of .*k_proj",
    ),
    "saved_head_too_narrow": Wrong(
        of="56_saved_head", change=with_tensor(f"{HEAD}weight", 259, 32), error=AdapterIncompatible, match="lm_head"
    ),
    "saved_head_flat": Wrong(
        of="56_saved_head", change=with_tensor(f"{HEAD}weight", 64), error=AdapterIncompatible, match="lm_head"
    ),
    "saved_head_grown_alone": Wrong(
        of="56_saved_head",
        change=with_tensor(f"{HEAD}weight", 260, 64),
        error=AdapterIncompatible,
        match=r"different size.*259 rows of model\.embed_tokens, 260 rows of lm_head",
    ),
    "saved_norm_shape": Wrong(
        of="59_saved_norms", change=with_tensor(f"{NORM}weight", 63), error=AdapterIncompatible, match=r"model\.norm"
    ),
    "saved_projection_grown": Wrong(
        of="59_saved_projection",
        change=with_tensor(f"{ATTENTION}k_proj.weight", 33, 64),
        error=AdapterIncompatible,
        match="k_proj",
    ),
    "saved_bias_missing": Wrong(
        of="59_saved_projection",
        change=without("layers.0.self_attn.k_proj.bias"),
        error=AdapterCorrupt,
        match="bias of .*k_proj is missing",
    ),
    "saved_bias_shape": Wrong(
        of="59_saved_projection",
        change=with_tensor(f"{ATTENTION}k_proj.bias", 1),
        error=AdapterIncompatible,
        match="bias of .*k_proj",
    ),
    "saved_bias_too_many": Wrong(
        of="56_saved_head",
        change=with_tensor(f"{HEAD}bias", 259),
        error=AdapterIncompatible,
        match="lm_head has no bias",
    ),
    "saved_but_not_covered": Wrong(
        of="59_saved_norms", config={"modules_to_save": None}, error=AdapterUnsupported, match=r"norm\.weight"
    ),
    "projection_not_covered": Wrong(
        of="02_rank_8",
        change=with_tensor(f"{ATTENTION}q_proj.weight", 64, 64),
        error=AdapterUnsupported,
        match=r"q_proj\.weight",
    ),
    "covered_but_not_saved": Wrong(
        of="02_rank_8",
        config={"modules_to_save": ["lm_head"]},
        error=AdapterCorrupt,
        match="modules_to_save covers modules whose weights are missing: lm_head",
    ),
    "one_norm_not_saved": Wrong(
        of="59_saved_norms",
        change=without("layers.1.input_layernorm"),
        error=AdapterCorrupt,
        match=r"modules_to_save covers .*layers\.1\.input_layernorm",
    ),
    "token_row_out_of_range": Wrong(
        of="61_tokens",
        config={"trainable_token_indices": [9, 5, VOCAB]},
        error=AdapterIncompatible,
        match=f"embed_tokens has a row for token {VOCAB}",
    ),
    "token_row_out_of_a_grown_range": Wrong(
        of="63_grown_tokens",
        config={"trainable_token_indices": [259, 5, 300]},
        error=AdapterIncompatible,
        match="embed_tokens has a row for token 300",
    ),
    "token_row_negative": Wrong(
        of="61_tokens",
        config={"trainable_token_indices": [9, 5, -1]},
        error=AdapterCorrupt,
        match="trainable_token_indices",
    ),
    "token_rows_too_many": Wrong(
        of="61_tokens", config={"trainable_token_indices": [9, 5]}, error=AdapterIncompatible, match=ROWS
    ),
    "token_rows_unnamed": Wrong(
        of="61_tokens", config={"trainable_token_indices": None}, error=AdapterCorrupt, match="trainable_token_indices"
    ),
    "token_rows_missing": Wrong(
        of="02_rank_8", config={"trainable_token_indices": [3]}, error=AdapterCorrupt, match=f"{ROWS} of .* is missing"
    ),
    "token_rows_of_one_end_missing": Wrong(
        of="61_tokens_both_ends", change=without(f"lm_head.{ROWS}"), error=AdapterCorrupt, match=f"{ROWS} of lm_head"
    ),
    "token_rows_of_a_projection": Wrong(
        of="02_rank_8",
        config={"trainable_token_indices": {"q_proj": [3]}},
        change=with_tensor(f"{ATTENTION}q_proj.{ROWS}", 1, 64),
        error=AdapterUnsupported,
        match="q_proj has token rows",
    ),
    "grown_by_two_sizes": Wrong(
        of="62_grown",
        change=with_tensor(f"{EMBEDDING}weight", 299, 64),
        error=AdapterIncompatible,
        match=r"different size.*299 rows of model\.embed_tokens, 300 rows of lm_head",
    ),
    "grown_embedding_missing": Wrong(
        of="62_grown", change=without("embed_tokens"), error=AdapterIncompatible, match="259 rows.*300 rows of lm_head"
    ),
    "grown_head_missing": Wrong(
        of="62_grown", change=without("lm_head"), error=AdapterIncompatible, match="300 rows.*259 rows of lm_head"
    ),
    "grown_low_rank_too_short": Wrong(
        of="62_grown_ends",
        change=with_tensor(f"{HEAD}lora_B.weight", 259, 8),
        error=AdapterIncompatible,
        match=r"lm_head .*lora_B \[259, 8\].*\[300, rank\]",
    ),
    "tied_copies_differ": Wrong(
        of="62_grown_tied",
        change=with_tensor(f"{HEAD}weight", 300, 64),
        error=AdapterCorrupt,
        match="two different copies of one tied matrix",
    ),
    "saved_ends_that_stay_tied_differ": Wrong(
        of="58_saved_ends_ensured",
        change=with_tensor(f"{HEAD}weight", 259, 64),
        error=AdapterCorrupt,
        match="two different copies of one tied matrix",
    ),
    "tied_pairs_differ": Wrong(
        of="60_ends_ensured",
        change=with_tensor(f"{HEAD}lora_B.weight", 259, 8),
        error=AdapterCorrupt,
        match="ensure_weight_tying gives .* one pair, but the weights hold two",
    ),
    "tied_pair_missing": Wrong(
        of="60_ends_ensured",
        change=without("lm_head.lora"),
        error=AdapterCorrupt,
        match="ensure_weight_tying gives .* one pair, but that of lm_head is missing",
    ),
    "pair_of_the_other_end": Wrong(
        of="60_ends_ensured",
        config={"ensure_weight_tying": False},
        error=AdapterIncompatible,
        match="lm_head, which the config does not target",
    ),
    "embedding_half_missing": Wrong(
        of="60_embedding",
        change=without("lora_embedding_B"),
        error=AdapterCorrupt,
        match=r"lora_embedding_B of model\.embed_tokens is missing",
    ),
    "embedding_width": Wrong(
        of="60_embedding",
        change=with_tensor(f"{EMBEDDING}lora_embedding_A", 8, 258),
        error=AdapterIncompatible,
        match=r"model\.embed_tokens",
    ),
    "embedding_pair_on_a_projection": Wrong(
        of="02_rank_8",
        change=with_tensor(f"{ATTENTION}q_proj.lora_embedding_A", 8, 64),
        error=AdapterUnsupported,
        match="q_proj.lora_embedding_A",
    ),
    "06_rank_pattern_order": Wrong(
        of="04_rank_pattern",
        config={"rank_pattern": {r"layers\.0\..*q_proj": 8, "(q|k)_proj": 3}},
        error=AdapterCorrupt,
        match="rank of .* differs between config and weights",
    ),
    "39_parameters_of_another_base": Wrong(
        of="02_rank_8",
        config={"target_parameters": ["mlp.experts.gate_up_proj"]},
        error=AdapterIncompatible,
        match=r"target_parameters names mlp\.experts\.gate_up_proj",
    ),
    "15_untargeted": Wrong(
        of="01_query_value", config={"target_modules": ["q_proj"]}, error=AdapterIncompatible, match="v_proj"
    ),
}
REFUSED_FIELDS: dict[str, Any] = {
    "arrow_config": {"top_k": 2},
}
for refused_field, value in REFUSED_FIELDS.items():
    WRONG[refused_field] = Wrong(
        of="02_rank_8", config={refused_field: value}, error=AdapterUnsupported, match=refused_field
    )
for init in ("pissa_niter_4", "corda", "loftq", "lora_ga", "unheard_of"):
    WRONG[f"68_{init}"] = Wrong(
        of="02_rank_8", config={"init_lora_weights": init}, error=AdapterUnsupported, match=f"init_lora_weights.*{init}"
    )


def test_both_halves_of_an_activated_adapter_count_as_memory(bench: Bench) -> None:
    name = "65_alora_with_all"
    checkpoint = open_checkpoint(bench.bases[CASES[name].base])
    loaded = load_adapter(name, bench.path(name), CheckpointWeights(checkpoint), max_bytes=1 << 30)
    checkpoint.close()
    weights = loaded.weights
    assert weights.dormant_patch.num_bytes > 0
    assert loaded.adapter.num_bytes == weights.patch.num_bytes + weights.dormant_patch.num_bytes


@pytest.mark.parametrize("name", WRONG)
def test_r014_r015_r021_wrong_files_are_refused_by_name_and_leave_nothing(
    name: str, bench: Bench, tmp_path: Path
) -> None:
    wrong = WRONG[name]
    shutil.copytree(bench.path(wrong.of), tmp_path / "wrong")
    edit_json(tmp_path / "wrong" / CONFIG, **wrong.config)
    if wrong.change is not None:
        rewrite(tmp_path / "wrong" / WEIGHTS, wrong.change)
    llm = bench.llm(CASES[wrong.of].base)
    before = llm.logits(PROMPT)
    with pytest.raises(wrong.error, match=wrong.match) as caught:
        llm.load_adapter("wrong", tmp_path / "wrong")
    assert type(caught.value) is wrong.error
    assert len(str(caught.value)) < 1000
    assert not llm.adapters
    assert torch.equal(llm.logits(PROMPT), before)
