"""Where a model's layers can be apart."""

from __future__ import annotations

from graftlm.errors import ConfigurationError
from graftlm.models.layer_span import LayerSpan
from graftlm.models.spec import ModelSpec


def boundaries(spec: ModelSpec) -> tuple[int, ...]:
    """Layers that can be the first of a span: none from there on reads keys and values of one before."""
    found, reads_from = [], len(spec.layers)
    for index in range(len(spec.layers) - 1, 0, -1):
        lender = spec.layers[index].attention.kv_layer
        reads_from = min(reads_from, index if lender is None else lender)
        if reads_from >= index:
            found.append(index)
    return tuple(reversed(found))


def boundary_width(spec: ModelSpec) -> int:
    """Numbers that a span gives the next one for each token: its hidden state, and the token as it was embedded where
    layers make inputs of that."""
    return spec.hidden_size if spec.layer_inputs is None else 2 * spec.hidden_size


def check_divisible(spec: ModelSpec, span: LayerSpan) -> None:
    """Refuse a span that parts a layer from one whose keys and values it reads.

    Raises:
        ConfigurationError: names where spans may begin.
    """
    allowed = boundaries(spec)
    outside = [bound for bound in (span.start, span.stop) if 0 < bound < span.num_layers and bound not in allowed]
    if outside:
        raise ConfigurationError(
            "layers would be apart of which some read keys and values of others",
            got=f"layers {span.start} to {span.stop - 1}",
            allowed=f"spans that begin with {_listed(allowed)}" if allowed else "all layers together",
            do="choose other worker_layers" if allowed else "use one worker, or none",
        )


def _listed(layers: tuple[int, ...]) -> str:
    """As stretches: those of real models are consecutive."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer for layer in layers if layer + 1 not in layers]
    return "layer 0, " + ", ".join(
        str(start) if start == stop else f"{start} to {stop}" for start, stop in zip(starts, stops, strict=True)
    )
