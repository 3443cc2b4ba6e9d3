"""How sequences whose adapter brings other layers go through the stages. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.models.layer_span import LayerSpan


def stack_passes(layers: Sequence[int], spans: Sequence[LayerSpan]) -> tuple[tuple[range, ...], ...]:
    """As few passes from the first stage to the last as compute all layers in their order.

    Args:
        layers: of the decoder, at each depth. spans: of the stages, which have all of them.

    Returns: of each pass the depths of each stage, which may be none. Those of the last stage stop at the end in the
        last pass alone.
    """
    passes: list[tuple[range, ...]] = []
    depth = 0
    while not passes or depth < len(layers):
        depths = []
        for span in spans:
            start = depth
            while depth < len(layers) and span.start <= layers[depth] < span.stop:
                depth += 1
            depths.append(range(start, depth))
        passes.append(tuple(depths))
    return tuple(passes)
