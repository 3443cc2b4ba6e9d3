"""Rotary angles of every scaling rule against transformers' and against the rule written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3RotaryEmbedding

from graftlm.layers.batch import RaggedBatch
from graftlm.layers.segments import Segments
from graftlm.models.config_reader import ConfigReader
from graftlm.models.rope import rotary_embedding
from graftlm.models.rope_config import read_rope

HEAD_DIM = 32
PAIRS = HEAD_DIM // 2
CONTEXT = 512
SHORT = [1.0 + 0.1 * pair for pair in range(PAIRS)]
LONG = [2.0 + 3.0 * pair for pair in range(PAIRS)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 128,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 128},
    "llama3_of_the_whole_context": LLAMA3,
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn_mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn_mscale_alone": {**YARN, "mscale": 0.8},
    "yarn_betas": {**YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn_untruncated": {**YARN, "truncate": False},
    "yarn_one_step_ramp": {**YARN, "beta_fast": 1, "beta_slow": 1, "truncate": False},
    "yarn_factor_from_contexts": {**YARN, "factor": None},
    "longrope": LONGROPE,
    "longrope_factor": {**LONGROPE, "factor": 16.0},
    "longrope_attention_factor": {**LONGROPE, "attention_factor": 1.3},
    "longrope_not_stretched": {**LONGROPE, "factor": 1.0},
}
# As long as the original context, one more, and as long as the model's, one more, and a lot more.
LENGTHS = (1, 17, 128, 129, 512, 513, 1500)
# The last bit of a frequency, 6e-8, times a position.
LAST_BIT = 1e-5


def angles(rope: dict[str, Any], positions: list[int], length: int) -> Tensor:
    """Cosines and sines of a sequence of `length` tokens, [T, 2, pairs]."""
    config = {"max_position_embeddings": CONTEXT, "rope_parameters": {"rope_theta": 50_000.0, **rope}}
    embedding = rotary_embedding(read_rope(ConfigReader(config), HEAD_DIM), torch.device("cpu"))
    cos, sin = embedding.angles(batch_of(positions, [length] * len(positions)), torch.float32)
    return torch.stack([cos[:, 0], sin[:, 0]], dim=1)


def batch_of(positions: list[int], lengths: list[int]) -> RaggedBatch:
    """A batch of which only positions and lengths matter: all tokens of each sequence are its prompt."""
    return RaggedBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        prompt_lens=torch.tensor(lengths),
        sequence_lens=torch.tensor(lengths),
        segments=Segments(),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        logit_segments=Segments(),
    )


def by_transformers(rope: dict[str, Any], length: int) -> Tensor:
    parameters = {"rope_theta": 50_000.0, **rope}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters=parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    pairs = cos.shape[-1] // 2
    return torch.stack([cos[0, :, :pairs], sin[0, :, :pairs]], dim=1)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_angles_are_those_of_transformers_at_every_length(rope: dict[str, Any]) -> None:
    for length in LENGTHS:
        expected = by_transformers(rope, length)
        torch.testing.assert_close(angles(rope, list(range(length)), length), expected, atol=LAST_BIT, rtol=0)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "yarn"])
def test_part_of_a_head_can_be_turned(name: str, share: float) -> None:
    if name == "default":
        config = Phi3Config(
            hidden_size=64,
            num_attention_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": share},
        )
        cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(600)[None])
        pairs = cos.shape[-1] // 2
        expected = torch.stack([cos[0, :, :pairs], sin[0, :, :pairs]], dim=1)
    else:
        expected = by_transformers({**ROPES[name], "partial_rotary_factor": share}, 600)
    got = angles({**ROPES[name], "partial_rotary_factor": share}, list(range(600)), 600)
    assert got.shape[-1] == int(HEAD_DIM * share) // 2
    torch.testing.assert_close(got, expected, atol=LAST_BIT, rtol=0)


def by_the_rule(rope: dict[str, Any], position: int, length: int) -> tuple[list[float], list[float]]:
    """Cosines and sines of one token, pair by pair, in Python's float64."""
    kind, theta, scale = rope["rope_type"], 50_000.0, 1.0
    original = rope.get("original_max_position_embeddings", CONTEXT)
    factor = rope.get("factor") or CONTEXT / original
    if kind == "dynamic":
        stretched = factor * max(length, CONTEXT) / CONTEXT - (factor - 1)
        theta *= stretched ** (HEAD_DIM / (HEAD_DIM - 2))
    frequencies = [theta ** (-2 * pair / HEAD_DIM) for pair in range(PAIRS)]
    if kind == "linear":
        frequencies = [frequency / factor for frequency in frequencies]
    if kind == "longrope":
        factors = LONG if length > original else SHORT
        frequencies = [frequency / own for frequency, own in zip(frequencies, factors, strict=True)]
        scale = rope.get("attention_factor", math.sqrt(1 + math.log(factor) / math.log(original)))
    if kind == "llama3":
        frequencies = [_blend(frequency, rope, original) for frequency in frequencies]
    if kind == "yarn":
        low, high = (
            HEAD_DIM * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))
            for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
        )
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, HEAD_DIM - 1)
        high += 0.001 if low == high else 0.0
        for pair in range(PAIRS):
            scaled = min(max((pair - low) / (high - low), 0.0), 1.0)
            frequencies[pair] *= scaled / factor + 1 - scaled
        numerator, denominator = rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0)
        if not denominator:
            numerator = 1.0
        inferred = (0.1 * numerator * math.log(factor) + 1) / (0.1 * denominator * math.log(factor) + 1)
        scale = rope.get("attention_factor", inferred)
    phases = [position * frequency for frequency in frequencies]
    return [scale * math.cos(phase) for phase in phases], [scale * math.sin(phase) for phase in phases]


def _blend(frequency: float, rope: dict[str, Any], original: int) -> float:
    turns = original * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * (kept + (1 - kept) / rope["factor"])


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_angles_follow_the_rule_to_a_millionth(rope: dict[str, Any]) -> None:
    positions = [0, 1, 2, 7]
    for length in LENGTHS:
        expected = torch.tensor([by_the_rule(rope, position, length) for position in positions], dtype=torch.float64)
        torch.testing.assert_close(angles(rope, positions, length).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_sequences_on_both_sides_of_the_threshold_do_not_touch_each_other(name: str) -> None:
    lengths = [40, 128, 129, 512, 600]
    positions = [3, 127, 5, 511, 599]
    config = {"max_position_embeddings": CONTEXT, "rope_parameters": {"rope_theta": 50_000.0, **ROPES[name]}}
    embedding = rotary_embedding(read_rope(ConfigReader(config), HEAD_DIM), torch.device("cpu"))
    together = embedding.angles(batch_of(positions, lengths), torch.float32)
    for row, (position, length) in enumerate(zip(positions, lengths, strict=True)):
        alone = embedding.angles(batch_of([position], [length]), torch.float32)
        assert torch.equal(together.cos[row], alone.cos[0])
        assert torch.equal(together.sin[row], alone.sin[0])


@pytest.mark.parametrize("old_type", ["su", "yarn", "longrope"])
def test_phi3_called_longrope_by_other_names(old_type: str) -> None:
    scaling = {"type": old_type, "short_factor": SHORT, "long_factor": LONG}
    config = {
        "max_position_embeddings": CONTEXT,
        "original_max_position_embeddings": 128,
        "rope_theta": 50_000.0,
        "rope_scaling": scaling,
    }
    renamed = {"su": "longrope", "yarn": "longrope"}
    old = read_rope(ConfigReader(config), HEAD_DIM, renamed_types=renamed)
    new = {"max_position_embeddings": CONTEXT, "rope_parameters": {"rope_theta": 50_000.0, **LONGROPE}}
    assert old == read_rope(ConfigReader(new), HEAD_DIM)
    assert hash(old) == hash(read_rope(ConfigReader(new), HEAD_DIM))


CONTEXTS: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, 512),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 512),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 2048),
    "llama3": (LLAMA3, 512),
    "yarn_of_a_stretched_context": (YARN, 512),
    "yarn_of_an_original_context": ({"rope_type": "yarn", "factor": 4.0}, 2048),
    "longrope": (LONGROPE, 512),
}


@pytest.mark.parametrize(("rope", "context"), CONTEXTS.values(), ids=CONTEXTS)
def test_the_context_is_what_the_scaling_makes_of_it(rope: dict[str, Any], context: int) -> None:
    config = ConfigReader({"max_position_embeddings": CONTEXT, "rope_parameters": rope})
    assert read_rope(config, HEAD_DIM).context_length(CONTEXT) == context
