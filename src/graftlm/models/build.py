"""From a checkpoint to a decoder: finds the family, checks every tensor, stacks fused projections."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.checkpoint import Checkpoint
from graftlm.errors import CheckpointError
from graftlm.layers.attention import Attention
from graftlm.layers.embedding import Embedding
from graftlm.layers.head import OutputHead
from graftlm.layers.kv_cache import KVShape
from graftlm.layers.linear import Linear
from graftlm.layers.mlp import GatedMLP
from graftlm.layers.norm import RMSNorm
from graftlm.layers.patch import Slot
from graftlm.layers.rotary import RotaryEmbedding
from graftlm.models.config_reader import ConfigReader
from graftlm.models.decoder import Decoder, DecoderLayer
from graftlm.models.families import FAMILIES
from graftlm.models.family import Family
from graftlm.models.rope import inverse_frequencies
from graftlm.models.site import FINAL_NORM_SLOT, FUSED_ROLES, NORM_ROLES, SiteMap, layer_slot, linear_shape, map_sites
from graftlm.models.spec import LayerRole, LayerSpec, ModelSpec, NameMap
from graftlm.quantization import DenseWeight, Weight

logger = logging.getLogger(__name__)


def build_decoder(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Read all weights of a checkpoint and assemble its decoder.

    Raises:
        CheckpointError: an unknown architecture, a config value that is not supported, or tensors that are missing,
            unknown or misshapen; the message lists them.
    """
    family, spec = read_spec(checkpoint)
    check_tensors(checkpoint, expected_shapes(spec, family.names), family.names)
    return _Builder(checkpoint, spec, family.names, dtype, device).build()


def read_spec(checkpoint: Checkpoint) -> tuple[Family, ModelSpec]:
    """Family and spec of a checkpoint, from its config alone.

    Raises:
        CheckpointError: an unknown architecture, or a config value that is not supported.
    """
    model_type = checkpoint.config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise CheckpointError(
            "config.json: this model_type is not supported", got=repr(model_type), allowed=", ".join(sorted(FAMILIES))
        )
    config = ConfigReader(checkpoint.config)
    spec = family.spec(config)
    if unread := config.unread():
        logger.warning("config.json has keys Graft does not read: %s", ", ".join(unread))
    return family, spec


def read_sites(checkpoint: Checkpoint) -> SiteMap:
    """Where adapters can attach to a checkpoint's model, without reading a weight.

    Raises:
        CheckpointError: as `read_spec`.
    """
    family, spec = read_spec(checkpoint)
    return map_sites(spec, family.names)


def expected_shapes(spec: ModelSpec, names: NameMap) -> dict[str, tuple[int, ...]]:
    """Every tensor a spec needs, with its shape. The head is absent when it is tied."""
    embedding_shape = (spec.vocab_size, spec.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.embedding}.weight": embedding_shape,
        f"{names.final_norm}.weight": (spec.hidden_size,),
    }
    if not spec.tied_head:
        shapes[f"{names.head}.weight"] = embedding_shape
    for index, layer in enumerate(spec.layers):
        for role, template in names.layer.items():
            path = template.format(index)
            if role in NORM_ROLES:
                shapes[f"{path}.weight"] = (spec.hidden_size,)
                continue
            shape = linear_shape(role, layer, spec.hidden_size)
            shapes[f"{path}.weight"] = shape
            if has_bias(role, layer):
                shapes[f"{path}.bias"] = shape[:1]
    return shapes


def has_bias(role: LayerRole, layer: LayerSpec) -> bool:
    """Whether a projection has a bias; the projections fused in one layer all have one or none."""
    if role in ("q", "k", "v"):
        return layer.attention.qkv_bias
    return layer.attention.output_bias if role == "output" else layer.mlp.bias


def check_tensors(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], names: NameMap) -> None:
    """Compare what the spec needs with what is there.

    Raises:
        CheckpointError: lists every missing, unknown and misshapen tensor (the first ten of each kind).
    """
    present = checkpoint.tensor_names()
    missing = sorted(expected.keys() - present)
    allowed_extra = re.compile("|".join((*names.ignored_tensors, re.escape(f"{names.head}.weight"))))
    unknown = sorted(name for name in present - expected.keys() if not allowed_extra.fullmatch(name))
    misshapen = [
        f"{name} {list(checkpoint.shape(name))} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in present and checkpoint.shape(name) != shape
    ]
    problems = [
        f"{kind}: {', '.join(found[:10])}" + (f" and {len(found) - 10} more" if len(found) > 10 else "")
        for kind, found in (("missing", missing), ("unknown", unknown), ("misshapen", misshapen))
        if found
    ]
    if problems:
        raise CheckpointError("the checkpoint's tensors do not fit its config", got="; ".join(problems))


class _Builder:
    """Reads tensors and makes layers of them."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, names: NameMap, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._names = names
        self._dtype = dtype
        self._device = device

    def build(self) -> Decoder:
        spec, names = self._spec, self._names
        table = self._weight([names.embedding])
        layers = [self._layer(index, layer) for index, layer in enumerate(spec.layers)]
        final_norm = self._norm(FINAL_NORM_SLOT, names.final_norm)
        head = self._head(table)
        shapes = [
            KVShape(num_kv_heads=layer.attention.num_kv_heads, head_dim=layer.attention.head_dim)
            for layer in spec.layers
        ]
        return Decoder(
            embedding=Embedding(table),
            rotary=RotaryEmbedding(inverse_frequencies(spec.rope).to(self._device)),
            layers=layers,
            final_norm=final_norm,
            head=head,
            kv_shapes=shapes,
            sites=map_sites(spec, names),
            vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_position_embeddings,
            dtype=self._dtype,
            device=self._device,
        )

    def _layer(self, index: int, layer: LayerSpec) -> DecoderLayer:
        attention = layer.attention
        return DecoderLayer(
            pre_attention_norm=self._layer_norm("pre_attention_norm", index),
            attention=Attention(
                qkv=self._linear(index, layer, "qkv"),
                output=self._linear(index, layer, "output"),
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                scale=attention.scale,
            ),
            pre_mlp_norm=self._layer_norm("pre_mlp_norm", index),
            mlp=GatedMLP(gate_up=self._linear(index, layer, "gate_up"), down=self._linear(index, layer, "down")),
        )

    def _head(self, table: Weight) -> OutputHead:
        return OutputHead(table if self._is_tied() else self._weight([self._names.head]))

    def _is_tied(self) -> bool:
        """A head that is in the file although the config ties it counts as tied only if it equals the embedding:
        transformers 5 does not tie two different matrices either."""
        if not self._spec.tied_head:
            return False
        name = f"{self._names.head}.weight"
        if name not in self._checkpoint.tensor_names():
            return True
        same = torch.equal(self._checkpoint.read(name), self._checkpoint.read(f"{self._names.embedding}.weight"))
        if not same:
            logger.warning("config.json ties the head, but %s differs from the embedding: using it untied", name)
        return same

    def _linear(self, index: int, layer: LayerSpec, group: str) -> Linear:
        roles = FUSED_ROLES[group]
        paths = [self._path(role, index) for role in roles]
        bias = self._stack([f"{path}.bias" for path in paths]) if has_bias(roles[0], layer) else None
        return Linear(layer_slot(index, group), self._weight(paths), bias)

    def _path(self, role: LayerRole, index: int) -> str:
        return self._names.layer[role].format(index)

    def _layer_norm(self, role: LayerRole, index: int) -> RMSNorm:
        return self._norm(layer_slot(index, role), self._path(role, index))

    def _norm(self, slot: Slot, path: str) -> RMSNorm:
        return RMSNorm(slot, self._stack([f"{path}.weight"]), self._spec.norm_eps)

    def _weight(self, paths: Sequence[str]) -> Weight:
        return DenseWeight(self._stack([f"{path}.weight" for path in paths]))

    def _stack(self, names: Sequence[str]) -> Tensor:
        """Tensors one under the other, copied out of the file: a file that is later truncated cannot hurt."""
        shapes = [self._checkpoint.shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        stacked = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            stacked[start : start + shape[0]].copy_(self._checkpoint.read(name))
            start += shape[0]
        return stacked
