"""Models with eight-bit weights and inputs, against transformers and PEFT with the compressed-tensors library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import compressed_tensors
import peft
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config
from typer.testing import CliRunner

from graftlm import LLM
from graftlm.calibration import quantize_calibrated, read_calibration_text
from graftlm.cli import app
from graftlm.text import load_tokenizer
from tests.parity.family_cases import FAMILY_CASES, FamilyCase
from tests.parity.oracle import LOUD, make_even_adapter, prompt_of
from tests.tiny import edit_json, make_llama, make_model

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")

# An input half a step from two codes may take either in two exact implementations, and every row after it shows that:
# about one row in a hundred. Hence many short prompts, of which some may.
PROMPTS = tuple(prompt_of(5, seed) for seed in range(12))
MAX_APART = 3
PROMPT = PROMPTS[0]
FAMILIES = ("llama", "gemma2", "gpt_bigcode")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(map(chr, prompt_of(2000, 9))), encoding="utf-8")
    return file


def quantize(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    return result.exit_code, result.output


class StaticWorld:
    """A base, what Graft made of it, and transformers' model of that."""

    def __init__(self, case: FamilyCase, folder: Path, text: Path) -> None:
        self.case = case
        self.base = make_model(folder / "base", case.config())
        quantize_calibrated(self.base, folder / "w8a8", text)
        self.quantized = folder / "w8a8"
        self.llm = LLM(self.quantized, kv_cache_bytes=16 << 20)

    def expected(self, adapter: Path | None = None) -> Tensor:
        model: Any = AutoModelForCausalLM.from_pretrained(self.quantized, dtype=torch.float32)
        if adapter is not None:
            for name in peft.PeftConfig.from_pretrained(adapter).modules_to_save or ():
                replace_modules(model, name)
            model = peft.PeftModel.from_pretrained(model, adapter)
        return logits_of(model)

    def logits(self, adapter: str | None = None) -> list[Tensor]:
        return [self.llm.logits(prompt, adapter=adapter) for prompt in PROMPTS]


def logits_of(model: Any) -> Tensor:
    """transformers' for all prompts, [n, T, V]."""
    with torch.no_grad():
        logits: Tensor = model.eval()(torch.tensor(PROMPTS)).logits
    return logits


def assert_alike(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    apart = 0
    for one, other in zip(ours, expected, strict=True):
        difference, size = (one - other).abs().max(), 1 + other.abs().max()
        assert difference < 0.1 * size
        apart += bool(difference > 1e-5 * size)
    assert apart <= MAX_APART


def replace_modules(model: torch.nn.Module, name: str) -> None:
    """Plain linear layers for those of this name: an adapter's own copies are in full precision, and read inputs so."""
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] == name and isinstance(module, torch.nn.Linear):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.load_state_dict({key: value for key, value in module.state_dict().items() if "scale" not in key})
            model.set_submodule(path, plain)


@pytest.fixture(scope="module", params=FAMILIES)
def world(
    request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StaticWorld]:
    world = StaticWorld(FAMILY_CASES[request.param], tmp_path_factory.mktemp("world"), text)
    yield world
    world.llm.shutdown()


def test_logits_are_those_of_transformers_with_rounded_inputs(world: StaticWorld) -> None:
    ours = world.logits()
    assert_alike(ours, world.expected())
    weights_alone = LLM(world.quantized, quantization="none", kv_cache_bytes=1 << 20).logits(PROMPT)
    full = LLM(world.base, kv_cache_bytes=1 << 20).logits(PROMPT)
    assert (ours[0] - weights_alone).abs().max() > LOUD
    assert (ours[0] - full).abs().max() > LOUD


def test_adapters_are_pefts_and_read_inputs_that_are_not_rounded(world: StaticWorld, tmp_path: Path) -> None:
    case, targets = world.case, list(world.case.targets)
    kinds: dict[str, dict[str, Any]] = {
        "lora": {"target_modules": targets},
        "dora": {"target_modules": targets, "use_dora": True},
        "head": {"target_modules": [case.head], "ensure_weight_tying": False},
        "saved_head": {"target_modules": targets[:1], "modules_to_save": [case.head]},
        "saved_module": {"target_modules": targets[:1], "modules_to_save": targets[-1:]},
    }
    folders = {
        name: make_even_adapter(world.base, tmp_path / name, **kind, **case.adapter_settings)
        for name, kind in kinds.items()
    }
    base = world.logits()
    for name, folder in folders.items():
        world.llm.load_adapter(name, folder)
    for name, folder in folders.items():
        ours = world.logits(name)
        assert_alike(ours, world.expected(folder))
        assert min(float((one - other).abs().max()) for one, other in zip(ours, base, strict=True)) > LOUD
    for name in folders:
        world.llm.unload_adapter(name)
    assert all(map(torch.equal, world.logits(), base))


def test_the_command_prints_the_perplexity_that_transformers_computes(text: Path, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    code, output = quantize(base, tmp_path / "out", "--to", "w8a8", "--calibrate", text)
    assert code == 0, output
    printed = re.search(r"perplexity: ([\d.]+) before, ([\d.]+) after \(([+-][\d.]+)%\), on (\d+) held-out", output)
    assert printed is not None, output
    held_out = read_calibration_text(text, load_tokenizer(base), max_len=512, vocab_size=259).held_out
    assert int(printed[4]) == len(held_out) > 0
    for folder, figure in ((base, printed[1]), (tmp_path / "out", printed[2])):
        assert float(figure) == pytest.approx(perplexity(folder, held_out), rel=1e-3)
    assert float(printed[3]) == pytest.approx(100 * (float(printed[2]) / float(printed[1]) - 1), abs=0.01)
    assert "down_proj" in output


@torch.no_grad()
def perplexity(folder: Path, sequences: tuple[tuple[int, ...], ...]) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = sum(
        float(model(ids := torch.tensor([sequence]), labels=ids).loss) * (len(sequence) - 1) for sequence in sequences
    )
    return float(torch.tensor(total / sum(len(sequence) - 1 for sequence in sequences)).exp())


def test_scales_are_the_largest_inputs_of_the_forward_pass(text: Path, tmp_path: Path) -> None:
    """Negative control of the calibration, too: with scales of one the model is another."""
    base = make_llama(tmp_path / "base")
    report = quantize_calibrated(base, tmp_path / "out", text)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    largest: dict[str, float] = {}
    for name, module in model.named_modules():
        if name.endswith("proj"):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: largest.update(
                    {name: max(largest.get(name, 0.0), float(inputs[0].abs().max()))}
                )
            )
    with torch.no_grad():
        for sequence in report.text.calibration:
            model(torch.tensor([sequence]))
    assert report.largest_inputs == pytest.approx(largest, rel=1e-4)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in largest.items():
        assert float(tensors[f"{name}.input_scale"]) == pytest.approx(value / 127, rel=1e-4)
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=0.05)
    ones = {name: torch.ones_like(tensor) if "input_scale" in name else tensor for name, tensor in tensors.items()}
    calibrated = LLM(tmp_path / "out", kv_cache_bytes=1 << 20).logits(PROMPT)
    save_file(ones, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    full = LLM(base, kv_cache_bytes=1 << 20).logits(PROMPT)
    uncalibrated = LLM(tmp_path / "out", kv_cache_bytes=1 << 20).logits(PROMPT)
    assert (uncalibrated - full).pow(2).mean() > 100 * (calibrated - full).pow(2).mean()


def test_scales_per_token_are_computed_as_the_checkpoint_says(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {**weights, "strategy": "token", "dynamic": True}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = compressed_tensors.BaseCompressor.get_value_from_registry("int-quantized")
    tensors = load_file(base / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        matrix = tensors.pop(name)
        scale = matrix.abs().amax(1, keepdim=True) / 127
        stored = compressor.compress({"weight": matrix, "weight_scale": scale}, scheme)
        tensors |= {f"{name.removesuffix('weight')}{role}": tensor for role, tensor in stored.items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    edit_json(
        base / "config.json",
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    )
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    ours, unrounded = (
        torch.stack([llm.logits(prompt) for prompt in PROMPTS])
        for llm in (LLM(base, kv_cache_bytes=1 << 20), LLM(base, quantization="none", kv_cache_bytes=1 << 20))
    )
    # A row's largest input lies halfway between two codes: there the two always part, by one step of hundreds.
    assert (ours - theirs).pow(2).mean() < 0.3 * (unrounded - theirs).pow(2).mean()
    assert (ours - unrounded).abs().max() > LOUD


def test_skipped_modules_stay_as_they_are(text: Path, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    code, output = quantize(
        base, tmp_path / "out", "--to", "w8a8", "--calibrate", text, "--skip", "down_proj", "--skip", "layers.0"
    )
    assert code == 0, output
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    kept = {name for name, tensor in after.items() if name.endswith("proj.weight") and tensor.dtype != torch.int8}
    assert kept == {name for name in before if "down_proj" in name or ("layers.0." in name and "proj" in name)}
    assert all(torch.equal(after[name], before[name]) for name in kept)
    llm = LLM(tmp_path / "out", kv_cache_bytes=1 << 20)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_alike([llm.logits(prompt) for prompt in PROMPTS], logits_of(model))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"", "too short"),
        (b"x", "too short"),
        (b"ab<pad>", "no row for"),
    ],
)
def test_a_text_nothing_can_be_learnt_from_is_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    code, output = quantize(
        make_llama(tmp_path / "base", vocab_size=258, pad_token_id=None),
        tmp_path / "out",
        "--to",
        "w8a8",
        "--calibrate",
        tmp_path / "text.txt",
    )
    assert (code, said in output) == (2, True), output
    assert not (tmp_path / "out").exists()


def test_a_short_text_is_measured_on_itself_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a short text", encoding="utf-8")
    code, output = quantize(
        make_llama(tmp_path / "base"), tmp_path / "out", "--to", "w8a8", "--calibrate", tmp_path / "text.txt"
    )
    assert code == 0
    assert "the same it was calibrated on" in output
    assert "calibrated on 1 sequences only" in output


def test_options_that_do_not_fit_are_refused(text: Path, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    for arguments, said in (
        (("--to", "w8a8"), "add --calibrate"),
        (("--to", "nf4", "--calibrate", text), "needs no calibration"),
        (("--to", "w8a8", "--calibrate", text, "--skip", "up"), "quantize_skip names modules"),
    ):
        code, output = quantize(base, tmp_path / "out", *arguments)
        assert (code, said in output) == (2, True), output
    conv1d = make_model(tmp_path / "gpt2", GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=259, n_positions=512))
    code, output = quantize(conv1d, tmp_path / "out", "--to", "w8a8", "--calibrate", text)
    assert (code, "Conv1D" in output) == (2, True), output
    assert not (tmp_path / "out").exists()


def test_a_model_whose_inputs_overflow_is_refused(text: Path, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    code, output = quantize(base, tmp_path / "out", "--to", "w8a8", "--calibrate", text)
    assert (code, "not finite" in output) == (2, True), output
