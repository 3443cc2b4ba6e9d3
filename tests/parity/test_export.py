"""Loading and saving leaves a checkpoint as it was: names, shapes, dtypes and bytes, for every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from graftlm.checkpoint import open_checkpoint
from graftlm.models.base_weights import BaseWeights, CheckpointWeights, DecoderWeights
from graftlm.models.build import build_decoder
from graftlm.models.export import export_checkpoint
from tests.parity.family_cases import FAMILY_CASES, FamilyCase
from tests.tiny import make_llama, make_model

Load = Callable[[Path], BaseWeights]


def decoder_weights(base: Path) -> BaseWeights:
    checkpoint = open_checkpoint(base)
    return DecoderWeights(build_decoder(checkpoint, dtype=torch.float32, device=torch.device("cpu")))


def file_weights(base: Path) -> BaseWeights:
    return CheckpointWeights(open_checkpoint(base))


LOADERS: dict[str, Load] = {"from_memory": decoder_weights, "from_disk": file_weights}


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def round_trip(base: Path, folder: Path, load: Load, **options: int) -> Path:
    folder.mkdir()
    export_checkpoint(load(base), open_checkpoint(base), folder, **options)
    return folder


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = read_all(first), read_all(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].shape == tensor.shape
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("case", FAMILY_CASES.values(), ids=FAMILY_CASES)
def test_every_family_is_saved_as_it_was_loaded(case: FamilyCase, tmp_path: Path) -> None:
    config = case.config()
    base = make_model(tmp_path / "base", config, dtype=torch.bfloat16)
    for name, load in LOADERS.items():
        saved = round_trip(base, tmp_path / name, load)
        assert_same_weights(saved, base)
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, saved))
        assert after.pop("tie_word_embeddings") == config.tie_word_embeddings
        before.pop("tie_word_embeddings", None)
        assert after == before
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (saved / file).read_bytes() == (base / file).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_tensor_keeps_its_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """All values here are exact in float32, which the model is loaded in."""
    base = make_llama(tmp_path / "base", dtype=torch.float16)
    path = base / "model.safetensors"
    save_file({name: t.to(dtype) for name, t in load_file(path).items()}, path, metadata={"format": "pt"})
    for name, load in LOADERS.items():
        assert_same_weights(round_trip(base, tmp_path / name, load), base)


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_large_model_is_saved_in_shards_that_transformers_reads(llama: Path, load: Load, tmp_path: Path) -> None:
    saved = round_trip(llama, tmp_path / "saved", load, max_shard_bytes=60_000)
    assert len(list(saved.glob("model-*-of-*.safetensors"))) > 2
    assert_same_weights(saved, llama)
    prompt = torch.tensor([[5, 9, 200, 40]])
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(prompt).logits for folder in (llama, saved)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("change", ["equal", "different"])
def test_a_head_beside_a_tied_embedding_is_kept_and_the_flag_tells_the_truth(
    load: Load, change: str, tmp_path: Path
) -> None:
    base = make_llama(tmp_path / "base", tied=True)
    tensors = load_file(base / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if change == "different":
        head += 1
    save_file({**tensors, "lm_head.weight": head}, base / "model.safetensors", metadata={"format": "pt"})
    saved = round_trip(base, tmp_path / "saved", load)
    assert_same_weights(saved, base)
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is (change == "equal")


def test_tensors_that_no_layer_reads_are_kept(llama: Path, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(8)}
    save_file({**tensors, **buffer}, base / "model.safetensors", metadata={"format": "pt"})
    assert_same_weights(round_trip(base, tmp_path / "saved", file_weights), base)


def test_code_beside_a_model_is_not_copied(llama: Path, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    (base / "modeling_llama.py").write_text("raise SystemExit")
    saved = round_trip(base, tmp_path / "saved", file_weights)
    assert not list(saved.glob("*.py"))
