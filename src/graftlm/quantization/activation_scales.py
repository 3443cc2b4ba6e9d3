"""What checkpoints say about quantising activations and the KV cache, and Graft does not do: but for integers times
integers (`W8A8Weight`), inputs stay in the compute dtype, which is at least as exact."""

from __future__ import annotations

import logging

from graftlm.quantization.format import StoredTensors
from graftlm.quantization.stored_module import present_names

logger = logging.getLogger(__name__)

MODULE_ROLES = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "output_global_scale",
    "k_scale",
    "v_scale",
)
# Beside the projections of an attention layer: tensors of the layer itself.
ATTENTION_ROLES = ("q_scale", "k_scale", "v_scale", "q_zero_point", "k_zero_point", "v_zero_point", "kv_scale")


def activation_scale_names(tensors: StoredTensors, path: str) -> frozenset[str]:
    """The tensors in the file that serve quantised activations of the module `path`, or the KV cache of the attention
    layer it belongs to: known, and needed by `W8A8Weight` alone."""
    layer = path.rpartition(".")[0]
    return present_names(tensors, path, MODULE_ROLES) | present_names(tensors, layer, ATTENTION_ROLES)


def tell_ignored(what: str, setting: object) -> None:
    """Log that a setting changes nothing here. what: "activations" or "the KV cache"."""
    logger.info("weights only: quantised %s are ignored (%s)", what, setting)
