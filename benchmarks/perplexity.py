"""What does quantising while loading cost in quality, and is it what bitsandbytes' costs?

SmolLM2-135M-Instruct in bfloat16 reads benchmarks/perplexity.txt, a page of English, in one piece; shown is the
exponential of the mean negative log-likelihood of its tokens. Weights are those of the bfloat16 checkpoint or quantised
from it; everything is computed in float32, so that nothing else differs. The bundled GGUF file (Q4_1) is where the
checkpoint comes from: its values already lie on a grid of sixteen levels per 32, and quantising adds to that error.
transformers with bitsandbytes is the reference: for NF4 in the mode in which it dequantises exactly, for int8 over the
matrices that bitsandbytes makes of its own codes and scales.

    python -m benchmarks.perplexity [--threads 1] [--quantization int8 nf4 nf4-double]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bitsandbytes as bnb
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from benchmarks.parity_real import model_file
from graftlm import LLM
from graftlm.checkpoint import open_checkpoint
from graftlm.config import Quantization

TEXT = Path(__file__).with_suffix(".txt")
# Most that the perplexity may grow by, as a fraction.
ALLOWED: dict[Quantization, float] = {"int8": 0.005, "nf4": 0.08, "nf4-double": 0.08}
REFERENCE_ALLOWED = 1e-3


def write_checkpoint(folder: Path) -> list[int]:
    """The model as a folder in bfloat16. Returns the text's tokens."""
    file = model_file()
    checkpoint = open_checkpoint(file)
    tensors = {name: checkpoint.read(name).bfloat16().contiguous() for name in checkpoint.tensor_names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)
    token_ids: list[int] = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return token_ids


def perplexity(logits: Tensor, token_ids: Sequence[int]) -> float:
    """logits: [T, V] float32."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])).exp())


def ours(folder: Path, token_ids: Sequence[int], quantization: Quantization | None) -> float:
    llm = LLM(folder, dtype="float32", quantization=quantization, quantization_cache=False, kv_cache_bytes=256 << 20)
    try:
        return perplexity(llm.logits(list(token_ids)), token_ids)
    finally:
        llm.shutdown()


def theirs(folder: Path, token_ids: Sequence[int], quantization: Quantization) -> float:
    if quantization == "int8":
        return their_int8(folder, token_ids)
    return their_nf4(folder, token_ids, double=quantization == "nf4-double")


@torch.no_grad()
def their_int8(folder: Path, token_ids: Sequence[int]) -> float:
    """Weights alone: LLM.int8() quantises inputs too, which Graft's int8 does not."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, scales, _ = bnb.functional.int8_vectorwise_quant(module.weight.data)
            module.weight.data = bnb.functional.int8_vectorwise_dequant(codes, scales)
    return perplexity(model(torch.tensor([list(token_ids)])).logits[0].float(), token_ids)


@torch.no_grad()
def their_nf4(folder: Path, token_ids: Sequence[int], *, double: bool) -> float:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    # In training mode, in which it does not round everything to bfloat16; the model has no dropout.
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    ).train()
    return perplexity(model(torch.tensor([list(token_ids)])).logits[0].float(), token_ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="more only help on an idle machine")
    parser.add_argument("--quantization", nargs="+", default=list(ALLOWED), choices=ALLOWED)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        token_ids = write_checkpoint(folder)
        full = ours(folder, token_ids, None)
        print(f"{platform.platform()}, torch {torch.__version__}, {len(token_ids)} tokens\n")
        print("| weights | perplexity | grows by | allowed | bitsandbytes | result |")
        print("|---|---|---|---|---|---|")
        print(f"| bfloat16 | {full:.4f} | | | | |")
        passed = True
        for quantization in options.quantization:
            allowed = ALLOWED[quantization]
            value = ours(folder, token_ids, quantization)
            within = value / full - 1 <= allowed
            expected = theirs(folder, token_ids, quantization)
            within = within and abs(value - expected) <= REFERENCE_ALLOWED
            passed = passed and within
            print(
                f"| {quantization} | {value:.4f} | {value / full - 1:.2%} | {allowed:.1%} | {expected:.4f} "
                f"| {'ok' if within else 'FAILED'} |",
                flush=True,
            )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
