"""Gradients of every parameter, against PEFT and autograd in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlm.adapters.module_tensors import PEFT_PREFIX
from graftlm.checkpoint import open_checkpoint
from graftlm.kernels import ops
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.registry import REFERENCE, choose_kernels, choose_training_kernels
from graftlm.models.base_weights import DecoderWeights
from graftlm.models.build import build_decoder
from graftlm.models.decoder import Decoder
from graftlm.quantization.policy import LoadPolicy
from graftlm.training.document import Document
from graftlm.training.job import TrainingJob
from graftlm.training.loss import CHUNK_ELEMENTS, backward
from graftlm.training.packed_batch import Share, pack
from graftlm.training.start import choose_start
from graftlm.training.trainable import TrainableAdapter
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.oracle import prompt_of
from tests.tiny import make_adapter, make_llama, make_model
from tests.training import peft_loop

# One of each family.
FAMILIES = (
    "llama",
    "llama_biases",
    "mistral_window",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "phi",
    "phi3",
    "olmo2",
    "smollm3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "bloom",
    "opt",
    "falcon_7b",
    "falcon_40b",
)
# What transformers computes in float32 even in a float64 model, the reference's error decides about: the softmax of
# capped scores, that of a router, and that of BLOOM's scores.
TOLERANCES = {"gemma2": 1e-5, "mixtral": 1e-5, "gpt_oss": 1e-5, "bloom": 1e-5}
# Torch's own attention knows no cap and no sinks, and transformers has none of it for BLOOM.
EAGER = ("gemma2", "gpt_oss", "bloom")


# Documents whose first tokens are a prompt.
DOCUMENTS = tuple(
    Document(token_ids=prompt_of(length, seed), learnt=tuple(place >= length // 3 for place in range(length)))
    for length, seed in ((2, 0), (17, 1), (5, 2))
)


def decoder_of(
    base: Path, dtype: torch.dtype = torch.float64, policy: LoadPolicy | None = None, kernels: Kernels = REFERENCE
) -> Decoder:
    checkpoint, device = open_checkpoint(base), torch.device("cpu")
    return build_decoder(checkpoint, dtype=dtype, device=device, policy=policy, kernels=kernels)


def trainable_of(adapter: Path, decoder: Decoder) -> TrainableAdapter:
    job = TrainingJob(data="unread", output="unwritten", init_adapter=str(adapter))
    return TrainableAdapter(choose_start(job, decoder.sites, "base"), DecoderWeights(decoder), seed=0)


def gradients_of(trainable: TrainableAdapter, decoder: Decoder, documents: tuple[Document, ...]) -> dict[str, Tensor]:
    packed = pack([Share(patch=trainable.patch(), documents=documents)], decoder)
    backward(decoder, packed, [1.0], recompute_layers=False)
    return {name: gradient for name, tensor in trainable.parameters.items() if (gradient := tensor.grad) is not None}


class DoubleNorm(torch.nn.Module):
    """A root-mean-square norm of transformers', in float64 throughout."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        name = type(norm).__name__
        self._eps = norm.eps if name.startswith("Gemma") else norm.variance_epsilon
        self.weight = getattr(norm, "weight", None)
        self._offset = 1.0 if name in ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm") else 0.0

    def forward(self, x: Tensor) -> Tensor:
        normed = x * (x.square().mean(dim=-1, keepdim=True) + self._eps).rsqrt()
        return normed if self.weight is None else normed * (self.weight + self._offset)


def double_norms(model: torch.nn.Module) -> None:
    """transformers computes a root-mean-square norm in float32 whatever the model is in."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, DoubleNorm(child))


def assert_gradients_of_peft(
    base: Path, adapter: Path, *, tolerance: float, attention: str = "sdpa", dtype: torch.dtype = torch.float64
) -> None:
    decoder = decoder_of(base, dtype)
    found = gradients_of(trainable_of(adapter, decoder), decoder, DOCUMENTS)

    model = peft_loop.load(base, adapter, dtype, attention)
    if dtype == torch.float64:
        double_norms(model)
    torch.stack(
        [peft_loop.summed_loss(model, document.token_ids, document.learnt) for document in DOCUMENTS]
    ).sum().backward()
    expected = {
        name.replace(".modules_to_save", "").replace(".default", "").replace("vector.weight", "vector"): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert found.keys() == expected.keys()
    assert all(name.startswith(PEFT_PREFIX) for name in found)
    for name, gradient in expected.items():
        assert gradient is not None
        assert gradient.abs().max() > 1e-4, name
        largest = gradient.abs().max().item()
        assert (found[name] - gradient).abs().max() <= tolerance * (1 + largest), name


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_peft(tmp_path: Path, family: str, *, use_dora: bool) -> None:
    """Of all linear layers, both ends and, beside LoRA, norms."""
    case = FAMILY_CASES[family]
    base = make_model(tmp_path / "base", case.config(), dtype=torch.float64)
    settings: dict[str, Any] = {"target_modules": [*case.targets, case.embedding, case.head], "use_dora": use_dora}
    if not use_dora:
        settings["modules_to_save"] = [list(decoder_of(base).sites.norms)[-1].rpartition(".")[2]]
    adapter = make_adapter(base, tmp_path / "adapter", scale=0.1, ensure_weight_tying=False, **settings)

    peft_loop.make_embedding_loud(adapter)
    assert_gradients_of_peft(
        base,
        adapter,
        tolerance=TOLERANCES.get(family, 1e-8),
        attention="eager" if family in EAGER else "sdpa",
    )


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen3_moe"])
def test_gradients_in_float32_are_those_of_peft(tmp_path: Path, family: str) -> None:
    case = FAMILY_CASES[family]
    base = make_model(tmp_path / "base", case.config())
    adapter = make_adapter(base, tmp_path / "adapter", scale=0.1, target_modules=list(case.targets))
    assert_gradients_of_peft(base, adapter, tolerance=1e-4, dtype=torch.float32)


# Tokens that the documents have, out of order.
TOKENS = [DOCUMENTS[1].token_ids[9], *sorted(DOCUMENTS[2].token_ids[:2])]
# A family -> what is trained besides q_proj or its like.
PARTS: dict[str, dict[str, Any]] = {
    "llama": {"modules_to_save": ["norm", "lm_head", "down_proj", "embed_tokens"]},
    "gemma": {"modules_to_save": ["norm", "embed_tokens"]},
    "gpt2": {"modules_to_save": ["ln_f", "c_fc", "wte"]},
    "gpt_bigcode": {"modules_to_save": ["ln_1", "lm_head"]},
    "bloom": {"trainable_token_indices": TOKENS},
    "opt": {"trainable_token_indices": {"lm_head": TOKENS}},
    "mixtral": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "gpt_oss": {"target_parameters": ["mlp.experts.down_proj"], "trainable_token_indices": TOKENS},
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.filterwarnings("ignore:.*lora_dropout.*:UserWarning")
@pytest.mark.parametrize("family", PARTS)
def test_gradients_of_whole_modules_token_rows_and_experts_are_those_of_peft(tmp_path: Path, family: str) -> None:
    """R120."""
    case = FAMILY_CASES[family]
    base = make_model(tmp_path / "base", case.config(), dtype=torch.float64)
    adapter = make_adapter(base, tmp_path / "adapter", scale=0.1, target_modules=[case.targets[0]], **PARTS[family])
    attention = "eager" if family in EAGER else "sdpa"
    assert_gradients_of_peft(base, adapter, tolerance=TOLERANCES.get(family, 1e-8), attention=attention)


def test_a_large_vocabulary_is_computed_in_parts_with_the_same_gradients(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", vocab_size=CHUNK_ELEMENTS // 10, hidden_size=8, intermediate_size=8)
    adapter = make_adapter(base, tmp_path / "adapter", scale=0.1, target_modules=["q_proj", "lm_head"], r=2)
    assert_gradients_of_peft(base, adapter, tolerance=1e-8)


def test_packed_documents_have_the_gradients_of_single_ones(llama: Path, tmp_path: Path) -> None:
    """R114: no document sees another, and positions begin anew."""
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules="all-linear")
    decoder = decoder_of(llama)
    packed = gradients_of(trainable_of(adapter, decoder), decoder, DOCUMENTS)
    alone = [gradients_of(trainable_of(adapter, decoder), decoder, (document,)) for document in DOCUMENTS]
    for name, gradient in packed.items():
        total = torch.stack([gradients[name] for gradients in alone]).sum(dim=0)
        assert (gradient - total).abs().max() <= 1e-10 * (1 + total.abs().max().item()), name


@pytest.mark.parametrize("kernels", [REFERENCE, choose_training_kernels(torch.device("cpu"))], ids=["torch", "codes"])
def test_a_four_bit_base_has_the_gradients_of_its_dequantised_form(
    llama: Path, tmp_path: Path, kernels: Kernels
) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules="all-linear")
    policy = LoadPolicy(quantization="nf4", keep_stored=False)
    quantised = decoder_of(llama, torch.float32, policy, kernels)
    found = gradients_of(trainable_of(adapter, quantised), quantised, DOCUMENTS)
    dense = decoder_of(llama, torch.float32)
    for slot, linear in dense.linears.items():
        linear.weight.dequantize().copy_(quantised.linears[slot].weight.dequantize())
    expected = gradients_of(trainable_of(adapter, dense), dense, DOCUMENTS)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * (1 + gradient.abs().max().item()), name
    unquantised = decoder_of(llama, torch.float32)
    exact = gradients_of(trainable_of(adapter, unquantised), unquantised, DOCUMENTS)
    assert any((found[name] - gradient).abs().max() > 1e-3 for name, gradient in exact.items())


def test_a_base_laid_out_for_serving_has_the_gradients_of_any_other(llama: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj", "lm_head", "down_proj"])
    served = decoder_of(llama, torch.float32, None, choose_kernels(torch.device("cpu"), deterministic=False))
    found = gradients_of(trainable_of(adapter, served), served, DOCUMENTS)
    plain = decoder_of(llama, torch.float32)
    for name, gradient in gradients_of(trainable_of(adapter, plain), plain, DOCUMENTS).items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * (1 + gradient.abs().max().item()), name


def test_the_low_rank_update_passes_gradcheck() -> None:
    torch.manual_seed(0)
    shapes = ((6, 5), (6, 4), (4, 5), (2, 2), (3, 3))
    out, x, shrink, first, second = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)

    def updated(out: Tensor, x: Tensor, shrink: Tensor, first: Tensor, second: Tensor) -> Tensor:
        expands = (
            ops.LoraExpand(matrix=first, out_start=0, out_stop=2, rank_start=0, rank_stop=2),
            ops.LoraExpand(matrix=second, out_start=2, out_stop=5, rank_start=2, rank_stop=5),
        )
        result = out * 2
        ops.lora(result, x, [ops.LoraSegment(1, 4, ops.LoraUpdate(shrink=shrink, expands=expands))])
        return result

    assert torch.autograd.gradcheck(updated, (out, x, shrink, first, second))
