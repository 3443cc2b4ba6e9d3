"""Layer replication: an adapter for a stack made of the base's layers, some of them repeated or left out.

Source: peft/tuners/tuners_utils.py, replicate_layers (0.21).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from graftlm.adapters.config_values import read_layer_ranges, shown
from graftlm.errors import AdapterIncompatible, AdapterUnsupported
from graftlm.models.site import SiteMap

FIELD = "layer_replication"
# PEFT follows attributes called model, and then looks for one called layers.
_LAYER_PATHS = re.compile(r"(model\.)+layers\.\d+")
# Beyond this a token takes more of the KV cache than any such model is worth; the largest that are known double it.
MAX_GROWTH = 8


def replicated_layers(raw: Mapping[str, Any], sites: SiteMap) -> tuple[int, ...] | None:
    """The base's layer at each depth of the stack that a config asks for; None for the base's own stack.

    Raises:
        AdapterCorrupt: the field's value is not a list of ranges.
        AdapterIncompatible: the base has no such layers.
        AdapterUnsupported: this base's layers cannot stand in for each other, or the stack is too high.
    """
    ranges = read_layer_ranges(FIELD, raw.get(FIELD))
    if not ranges:
        return None
    num_layers = len(sites.layer_paths)
    got = shown(raw[FIELD])
    if any(stop > num_layers for _, stop in ranges):
        raise AdapterIncompatible(
            f"adapter_config.json: {FIELD} names layers that this base does not have",
            got=got,
            allowed=f"layers below {num_layers}",
            do="load it over the base it was trained on",
        )
    if sum(stop - start for start, stop in ranges) > MAX_GROWTH * num_layers:
        raise AdapterUnsupported(
            f"adapter_config.json: {FIELD} makes a stack that is too high",
            got=got,
            allowed=f"at most {MAX_GROWTH * num_layers} layers",
        )
    layers = tuple(layer for start, stop in ranges for layer in range(start, stop))
    if layers == tuple(range(num_layers)):
        return None
    if _LAYER_PATHS.fullmatch(sites.layer_paths[0]) is None:
        raise AdapterUnsupported(
            f"adapter_config.json: {FIELD} over this base: PEFT does not find its layers",
            got=sites.layer_paths[0],
            allowed="model.layers.0",
        )
    if not sites.interchangeable_layers:
        raise AdapterUnsupported(
            f"adapter_config.json: {FIELD} over a base whose layers differ in how far they see, in what they cache or "
            "in what they read of other layers is not supported",
            got=got,
        )
    return layers
