"""What workers can take by what they measured, what layers weigh, and layers that are told."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from safetensors.torch import load_file

from graftlm import EngineConfig
from graftlm.checkpoint import open_checkpoint
from graftlm.distributed.chain_bytes import chain_bytes
from graftlm.distributed.messages import WorkerMeasure
from graftlm.distributed.partition import capacities, chain_work, explicit_spans, spans_of
from graftlm.errors import ConfigurationError
from graftlm.models.layout import lay_out
from graftlm.models.read import read_spec
from graftlm.routing.spans import Capacity
from tests.distributed.rig import NUM_LAYERS


def test_spans_can_be_told() -> None:
    spans = explicit_spans([1, 3], 4)
    assert spans == spans_of([0, 1, 4])
    assert [(span.start, span.stop, span.is_first, span.is_last) for span in spans] == [
        (0, 1, True, False),
        (1, 4, False, True),
    ]


def test_spans_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not add up"):
        explicit_spans([1, 2], 4)


def test_workers_of_one_node_are_as_fast_as_its_fastest_and_share_its_memory() -> None:
    measures = [
        WorkerMeasure(node="big", seconds=1.0, free_bytes=1000),
        WorkerMeasure(node="small", seconds=2.0, free_bytes=300),
        # Something else ran while it was measured.
        WorkerMeasure(node="big", seconds=4.0, free_bytes=1100),
    ]
    big, small = Capacity(speed=Fraction(1), memory_bytes=450), Capacity(speed=Fraction(4, 9), memory_bytes=270)
    assert capacities(measures) == [big, small, big]


def test_bytes_are_those_of_the_matrices_in_the_file_and_of_the_cache(base: Path) -> None:
    num_blocks, block_size = 10, 16
    checkpoint = open_checkpoint(base)
    family, spec = read_spec(checkpoint)
    layout = lay_out(spec, family.names)
    matrices = {name: tensor for name, tensor in load_file(base / "model.safetensors").items() if tensor.ndim == 2}
    attention = spec.layers[0].attention
    cached = num_blocks * block_size * 2 * attention.num_kv_heads * attention.head_dim * 4
    weights = [
        sum(tensor.nbytes for name, tensor in matrices.items() if f".layers.{layer}." in name)
        for layer in range(NUM_LAYERS)
    ]
    memory = chain_bytes(EngineConfig(model=base), checkpoint, spec, layout, [num_blocks])
    assert memory.layers == tuple(weight + cached for weight in weights)
    assert memory.before == matrices["model.embed_tokens.weight"].nbytes
    assert memory.after == matrices["lm_head.weight"].nbytes
    # Four bits and a scale for each 64 of them instead of 32, and a few bytes for the code itself.
    quantised = chain_bytes(EngineConfig(model=base, quantization="nf4"), checkpoint, spec, layout, [num_blocks])
    assert quantised.layers == pytest.approx([weight // 64 * 9 + cached for weight in weights], rel=0.001)
    assert (quantised.before, quantised.after) == (memory.before, memory.after)
    # Multiplied with are the same matrices, but for the table, which is looked up.
    work = chain_work(spec, layout)
    assert work.layers == tuple(weight // 4 for weight in weights)
    assert (work.before, work.after) == (0, memory.after // 4)
