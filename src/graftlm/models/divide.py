"""Whether a model's layers can be apart."""

from __future__ import annotations

from graftlm.errors import ConfigurationError
from graftlm.models.layer_span import LayerSpan
from graftlm.models.spec import ModelSpec


def check_divisible(spec: ModelSpec, span: LayerSpan) -> None:
    """Refuse a span that needs more than the hidden state of the span before.

    Raises:
        ConfigurationError
    """
    if spec.layer_inputs is not None and not (span.is_first and span.is_last):
        raise ConfigurationError(
            "this model cannot be divided: each of its layers has inputs of its own, made from the tokens",
            do="use one worker, or none",
        )
    lenders = {layer.attention.kv_layer for layer in spec.layers[span.start : span.stop]} - {None}
    outside = sorted(layer for layer in lenders if layer is not None and layer < span.start)
    if outside:
        raise ConfigurationError(
            "a worker's layers read keys and values of layers that another worker has",
            got=f"layers {span.start} to {span.stop - 1} read those of {outside}",
            do="choose other worker_layers",
        )
