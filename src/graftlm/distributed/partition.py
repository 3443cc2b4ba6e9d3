"""Which worker computes which layers. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from graftlm.errors import ConfigurationError
from graftlm.models.layer_span import LayerSpan
from graftlm.models.layout import LayerLayout, LinearLayout, ModelLayout


def balanced_spans(weights: Sequence[int], num_workers: int, *, before: int, after: int) -> tuple[LayerSpan, ...]:
    """Consecutive spans of which the heaviest is as light as can be.

    Args:
        weights: of the layers. before, after: what the first span bears besides its layers, and the last.

    Raises:
        ConfigurationError: there are more workers than layers.
    """
    if num_workers > len(weights):
        raise ConfigurationError("there are more workers than layers", got=num_workers, allowed=f"1 to {len(weights)}")
    sums = [0, *accumulate(weights)]
    sums = [sums[0], *(total + before for total in sums[1:-1]), sums[-1] + before + after]
    # best[stop]: the heaviest span among the first spans that end there, and where the last of them begins.
    best: dict[int, tuple[int, tuple[int, ...]]] = {stop: (sums[stop], (0, stop)) for stop in range(1, len(sums))}
    for count in range(2, num_workers + 1):
        best = {
            stop: min(
                (max(best[start][0], sums[stop] - sums[start]), (*best[start][1], stop))
                for start in range(count - 1, stop)
            )
            for stop in range(count, len(sums))
        }
    return _spans(best[len(weights)][1])


def explicit_spans(counts: Sequence[int], num_layers: int) -> tuple[LayerSpan, ...]:
    """Spans of so many layers each.

    Raises:
        ConfigurationError: they are not all layers together.
    """
    if sum(counts) != num_layers:
        raise ConfigurationError(
            "worker_layers does not add up to the model's layers", got=sum(counts), allowed=str(num_layers)
        )
    return _spans([0, *accumulate(counts)])


def layer_weights(layout: ModelLayout) -> tuple[int, ...]:
    """Parameters of each layer's matrices."""
    return tuple(_layer_weight(layer) for layer in layout.layers)


def end_weights(layout: ModelLayout) -> tuple[int, int]:
    """Parameters of what stands before the first layer and after the last. A table that both ends use counts twice,
    since both hold it."""
    return sum(rows * width for rows, width in layout.tables.values()), _weight(layout.head)


def _layer_weight(layer: LayerLayout) -> int:
    experts = [linear for expert in layer.experts for linear in expert.values()]
    return sum(_weight(linear) for linear in (*layer.linears.values(), *experts))


def _weight(linear: LinearLayout) -> int:
    return linear.in_features * sum(module.rows for module in linear.modules)


def _spans(bounds: Sequence[int]) -> tuple[LayerSpan, ...]:
    return tuple(LayerSpan(start=start, stop=stop, num_layers=bounds[-1]) for start, stop in pairwise(bounds))
