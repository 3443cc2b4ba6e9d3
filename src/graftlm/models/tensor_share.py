"""Which part of every matrix a rank has, where ranks share layers out by tensors: from the spec alone. No torch.

Attention is divided by heads, feed-forward layers by their inner features, a mixture by its experts, both ends by the
vocabulary; norms, routers and what is small are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graftlm.errors import ConfigurationError
from graftlm.layers.patch import Slot
from graftlm.models.layout import HEAD_SLOT, LayerLayout, LinearLayout, ModelLayout
from graftlm.models.spec import AttentionSpec, ClampedSwiGLU, LayerSpec, LinearRole, MLPSpec, ModelSpec

# Boundaries between inner features fall where formats' blocks end, if there are features enough.
FEATURE_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Part:
    """[start, stop) of something."""

    start: int
    stop: int

    def within(self, start: int, stop: int) -> Part | None:
        """What it has of [start, stop), counted from there."""
        first, last = max(self.start, start), min(self.stop, stop)
        return Part(start=first - start, stop=last - start) if first < last else None


@dataclass(frozen=True, kw_only=True)
class MatrixShare:
    """A rank's part of a matrix: either some of its rows, one stretch after the other, or some of its columns."""

    rows: tuple[Part, ...] = ()
    columns: Part | None = None


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """A rank's heads: consecutive queries, and the keys and values they look at."""

    queries: Part
    keys: Part


@dataclass(frozen=True, kw_only=True)
class ModelShare:
    """What a rank has of a model.

    layers: the spec of each layer as this rank computes it. heads: which heads those are.
    matrices: its parts of linear layers; what is not named is whole. experts: of each layer with a mixture.
    vocabulary: of every rank, in order.
    """

    layers: tuple[LayerSpec, ...]
    heads: tuple[HeadShare, ...]
    matrices: Mapping[Slot, MatrixShare]
    experts: Mapping[int, Part]
    vocabulary: tuple[Part, ...]


def share_model(spec: ModelSpec, layout: ModelLayout, *, rank: int, size: int) -> ModelShare:
    """A rank's share of a model.

    Raises:
        ConfigurationError: the model cannot be divided among so many; the message names what.
    """
    _check(spec, size)
    matrices: dict[Slot, MatrixShare] = {}
    heads, layers, experts = [], [], {}
    for index, (layer, names) in enumerate(zip(spec.layers, layout.layers, strict=True)):
        head = share_heads(_with_its_keys(layer.attention, spec.layers), index, rank=rank, size=size)
        heads.append(head)
        layers.append(replace(layer, attention=_own_attention(layer.attention, head)))
        matrices |= _attention_matrices(layer.attention, names, head)
        if isinstance(layer.mlp, MLPSpec):
            up: LinearRole = "gate_up" if layer.mlp.gated or isinstance(layer.mlp.activation, ClampedSwiGLU) else "up"
            matrices |= _mlp_matrices(layer.mlp, names.linears[up], names.linears["down"], rank, size)
        mixture = layer.mixture
        if mixture is None:
            continue
        experts[index] = divide(mixture.num_experts, size, "experts")[rank]
        if mixture.shared is not None:
            shared = names.linears["shared_gate_up"], names.linears["shared_down"]
            matrices |= _mlp_matrices(mixture.shared, *shared, rank, size)
    vocabulary = divide(spec.vocab_size, size, "tokens in the vocabulary")
    matrices[HEAD_SLOT] = MatrixShare(rows=(vocabulary[rank],))
    return ModelShare(
        layers=tuple(layers), heads=tuple(heads), matrices=matrices, experts=experts, vocabulary=vocabulary
    )


def divide(count: int, size: int, what: str, *, block: int = 1) -> tuple[Part, ...]:
    """Parts as equal as can be. block: boundaries are multiples of it.

    Raises:
        ConfigurationError: there are fewer than ranks.
    """
    whole, rest = divmod(count // block, size)
    if whole == 0:
        raise ConfigurationError(
            f"tensor_parallel is larger than the number of {what}", got=f"{size} ranks", allowed=f"at most {count}"
        )
    bounds = [block * (rank * whole + min(rank, rest)) for rank in range(size)]
    return tuple(Part(start=start, stop=stop) for start, stop in zip(bounds, [*bounds[1:], count], strict=True))


def share_heads(attention: AttentionSpec, layer: int, *, rank: int, size: int) -> HeadShare:
    """A rank's heads. With more ranks than key heads several have the same key head, and each some of its queries.

    Raises:
        ConfigurationError: a rank would have no query head.
    """
    num_keys = attention.num_kv_heads
    group = attention.num_heads // num_keys
    if size <= num_keys:
        keys = divide(num_keys, size, "key-value heads")[rank]
        return HeadShare(queries=Part(start=keys.start * group, stop=keys.stop * group), keys=keys)
    holders = divide(size, num_keys, "ranks")
    key = next(index for index, ranks in enumerate(holders) if ranks.start <= rank < ranks.stop)
    num_holders = holders[key].stop - holders[key].start
    if num_holders > group:
        raise ConfigurationError(
            f"the attention heads of layer {layer} cannot be divided among so many ranks",
            got=f"{attention.num_heads} heads, {num_keys} key-value heads, {size} ranks",
            allowed="at most as many ranks for a key-value head as it has heads",
            do="lower tensor_parallel",
        )
    own = divide(group, num_holders, "heads")[rank - holders[key].start]
    queries = Part(start=key * group + own.start, stop=key * group + own.stop)
    return HeadShare(queries=queries, keys=Part(start=key, stop=key + 1))


def _check(spec: ModelSpec, size: int) -> None:
    reason = None
    for layer in spec.layers:
        for role, heads in (("query", layer.attention.num_heads), ("key", layer.attention.num_kv_heads)):
            norm = layer.norms.get(role)  # type: ignore[call-overload]
            width = None if norm is None else norm.size or spec.hidden_size
            if width is not None and width != layer.attention.head_dim:
                reason = f"its {role} norm sees all {heads} heads at once"
    if reason is not None:
        raise ConfigurationError(
            f"this model cannot be divided by tensors: {reason}",
            got=f"tensor_parallel={size}",
            do="divide it by layers (workers)",
        )


def _with_its_keys(attention: AttentionSpec, layers: Sequence[LayerSpec]) -> AttentionSpec:
    """With as many key heads as there are in the layer whose keys it reads: a rank has those of its own queries."""
    if attention.kv_layer is None:
        return attention
    return replace(attention, num_kv_heads=layers[attention.kv_layer].attention.num_kv_heads)


def _own_attention(attention: AttentionSpec, head: HeadShare) -> AttentionSpec:
    alibi = attention.alibi
    if alibi is not None:
        alibi = replace(alibi, slopes=alibi.slopes[head.queries.start : head.queries.stop])
    return replace(
        attention,
        num_heads=head.queries.stop - head.queries.start,
        num_kv_heads=head.keys.stop - head.keys.start,
        alibi=alibi,
    )


def _attention_matrices(attention: AttentionSpec, names: LayerLayout, head: HeadShare) -> dict[Slot, MatrixShare]:
    dim, num_queries, num_keys = attention.head_dim, attention.num_heads, attention.num_kv_heads
    output = MatrixShare(columns=_scaled(head.queries, dim))
    slot = names.linears["qkv"].slot
    if attention.kv_layer is not None:
        rows: tuple[Part, ...] = (_scaled(head.queries, dim),)
    elif attention.head_order != "grouped":
        sections = [num_queries] if attention.head_order == "keys_as_values" else [num_queries, num_queries + num_keys]
        keys = [Part(start=start + head.keys.start, stop=start + head.keys.stop) for start in sections]
        rows = tuple(_scaled(part, dim) for part in (head.queries, *keys))
    else:
        rows = _grouped_rows(head, num_queries // num_keys, dim)
    return {slot: MatrixShare(rows=rows), names.linears["output"].slot: output}


def _grouped_rows(head: HeadShare, group: int, dim: int) -> tuple[Part, ...]:
    """Of a projection that has, for each key head, its query heads, its key and its value."""
    rows = []
    for key in range(head.keys.start, head.keys.stop):
        start = key * (group + 2)
        own = head.queries.within(key * group, (key + 1) * group)
        if own is not None:
            rows.append(Part(start=start + own.start, stop=start + own.stop))
        rows.append(Part(start=start + group, stop=start + group + 2))
    return tuple(_scaled(part, dim) for part in rows)


def _mlp_matrices(mlp: MLPSpec, up: LinearLayout, down: LinearLayout, rank: int, size: int) -> dict[Slot, MatrixShare]:
    features = mlp.intermediate_size
    block = FEATURE_BLOCK
    while features % block or features // block < size:
        block //= 2
        if block == 0:
            break
    own = divide(features, size, "inner features of a feed-forward layer", block=max(block, 1))[rank]
    if isinstance(mlp.activation, ClampedSwiGLU):
        rows: tuple[Part, ...] = (_scaled(own, 2),)
    elif mlp.gated:
        rows = (own, Part(start=features + own.start, stop=features + own.stop))
    else:
        rows = (own,)
    return {up.slot: MatrixShare(rows=rows), down.slot: MatrixShare(columns=own)}


def _scaled(part: Part, factor: int) -> Part:
    return Part(start=part.start * factor, stop=part.stop * factor)
