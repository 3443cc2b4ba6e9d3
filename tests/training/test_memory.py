"""What training takes beside the weights."""

from __future__ import annotations

from pathlib import Path

import torch

from graftlm.engine.memory import return_free_memory
from graftlm.training.document import Document
from graftlm.training.loss import backward
from graftlm.training.packed_batch import Share, pack
from tests.tiny import make_adapter, make_llama
from tests.training.test_gradients import decoder_of, trainable_of

VOCAB_SIZE, LENGTH = 262_144, 1024


def memory(field: str) -> int:
    """Bytes of this process, by Linux's account: VmRSS now, VmHWM at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def test_a_head_of_262144_entries_adds_less_than_100_mb_at_1024_tokens(tmp_path: Path) -> None:
    base = make_llama(
        tmp_path / "base", vocab_size=VOCAB_SIZE, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], r=2)
    decoder = decoder_of(base, torch.float32)
    trainable = trainable_of(adapter, decoder)
    generator = torch.Generator().manual_seed(0)
    token_ids = tuple(torch.randint(VOCAB_SIZE, (LENGTH + 1,), generator=generator).tolist())
    document = Document(token_ids=token_ids, learnt=(True,) * len(token_ids))
    packed = pack([Share(patch=trainable.patch(), documents=(document,))], decoder)
    return_free_memory()
    before = memory("VmRSS")
    # The peak begins anew.
    Path("/proc/self/clear_refs").write_text("5")
    backward(decoder, packed, [1.0], recompute_layers=False)
    added = memory("VmHWM") - before
    assert added < 100e6
    assert all(parameter.grad is not None for parameter in trainable.parameters.values())
