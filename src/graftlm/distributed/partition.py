"""Which worker computes which layers. Computes nothing itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import prod

from graftlm.distributed.messages import WorkerMeasure
from graftlm.errors import ConfigurationError
from graftlm.models.divide import boundaries
from graftlm.models.layer_span import LayerSpan
from graftlm.models.layout import LayerLayout, LinearLayout, ModelLayout
from graftlm.models.spec import ModelSpec
from graftlm.routing.spans import Capacity, ChainWeights, stepped_speeds

# Of a node's free memory; the rest is for adapters, for what steps need, and for others.
LAYERS_SHARE = Fraction(9, 10)


def explicit_spans(counts: Sequence[int], num_layers: int) -> tuple[LayerSpan, ...]:
    """Spans of so many layers each.

    Raises:
        ConfigurationError: they are not all layers together.
    """
    if sum(counts) != num_layers:
        raise ConfigurationError(
            "worker_layers does not add up to the model's layers", got=sum(counts), allowed=str(num_layers)
        )
    return spans_of([0, *accumulate(counts)])


def spans_of(bounds: Sequence[int]) -> tuple[LayerSpan, ...]:
    """Spans that begin where the one before ends."""
    return tuple(LayerSpan(start=start, stop=stop, num_layers=bounds[-1]) for start, stop in pairwise(bounds))


def chain_work(spec: ModelSpec, layout: ModelLayout) -> ChainWeights:
    """Parameters of each layer's matrices, of the projection of its own inputs, if it has any, and of the output head,
    all of which are multiplied with. Tables are only looked up."""
    inputs = 0 if layout.layer_input_projection is None else _weight(layout.layer_input_projection)
    return ChainWeights(
        layers=tuple(_layer_weight(layer) + inputs // len(layout.layers) for layer in layout.layers),
        before=0,
        after=_weight(layout.head),
        boundaries=boundaries(spec),
    )


def table_weights(layout: ModelLayout) -> tuple[int, int]:
    """Parameters of the tables before the first layer, and of each layer's part of the table of its own inputs."""
    inputs = 0 if layout.layer_input_table is None else prod(layout.tables[layout.layer_input_table])
    return sum(map(prod, layout.tables.values())) - inputs, inputs // len(layout.layers)


def capacities(measures: Sequence[WorkerMeasure]) -> list[Capacity]:
    """What workers can take by what they measured. Those of one node are equally fast, as its fastest says, and share
    its memory."""
    num_there = Counter(measure.node for measure in measures)
    seconds = {node: min(each.seconds for each in measures if each.node == node) for node in num_there}
    free = {node: min(each.free_bytes for each in measures if each.node == node) for node in num_there}
    speeds = stepped_speeds([seconds[measure.node] for measure in measures])
    return [
        Capacity(speed=speed, memory_bytes=int(LAYERS_SHARE * free[measure.node] / num_there[measure.node]))
        for measure, speed in zip(measures, speeds, strict=True)
    ]


def _layer_weight(layer: LayerLayout) -> int:
    experts = [linear for expert in layer.experts for linear in expert.values()]
    return sum(_weight(linear) for linear in (*layer.linears.values(), *experts))


def _weight(linear: LinearLayout) -> int:
    return linear.in_features * sum(module.rows for module in linear.modules)
