"""compressed-tensors' quantization_config: which modules are quantised how. Knows nothing of tensors.

Source: compressed-tensors 0.20, quantization/quant_config.py, quant_args.py and utils/match.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graftlm.quantization.activation_scales import tell_ignored
from graftlm.quantization.name_pattern import NamePattern
from graftlm.quantization.settings import Settings

FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
InputRounding = Literal["static", "token"]
# By strategy and whether scales are found anew for each input.
_INPUT_ROUNDINGS: Mapping[tuple[Any, Any], InputRounding] = {("tensor", False): "static", ("token", True): "token"}
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
REGEX = "re:"
_OTHER_LAYOUT = "use the checkpoint in one of these formats; sparse layouts and those of one GPU kernel are not read"


@dataclass(frozen=True, kw_only=True)
class CompressedScheme:
    """How the weights of some modules are quantised.

    names, patterns: of the modules. by_class: whether it is for all modules of a class.
    num_bits: of a code. symmetric: whether zero points are left out; None where the config is silent.
    block: rows and columns that share a scale; None where only the tensors tell.
    inputs: how the modules' inputs are rounded to eight bits; None where they stay as they are.
    """

    names: frozenset[str]
    patterns: tuple[NamePattern, ...]
    by_class: bool
    num_bits: int | None
    symmetric: bool | None
    block: tuple[int, int] | None
    inputs: InputRounding | None

    def names_module(self, path: str) -> bool:
        return path in self.names or any(pattern.matches(path) for pattern in self.patterns)


# Where the config has no scheme for a module: the tensors alone decide.
UNKNOWN_SCHEME = CompressedScheme(
    names=frozenset(), patterns=(), by_class=False, num_bits=None, symmetric=None, block=None, inputs=None
)


def read_schemes(config: Mapping[str, Any]) -> list[CompressedScheme]:
    """The schemes in the config's order.

    Raises:
        CheckpointError: a format that is unknown or made for one kernel, rotated weights, a broken entry.
    """
    settings = Settings(config)
    settings.text("format", allowed=FORMATS, why=_OTHER_LAYOUT)
    sparsity = settings.child("sparsity_config")
    if sparsity is not None:
        sparsity.text("format", allowed=["dense"], why=_OTHER_LAYOUT)
    if settings.get("transform_config"):
        # They rotate inputs while the model runs: without them the stored weights mean something else.
        raise settings.refused("transform_config", settings.get("transform_config"), "none")
    if settings.get("kv_cache_scheme") is not None:
        tell_ignored("the KV cache", "kv_cache_scheme")
    return [_scheme(group) for group in settings.children("config_groups").values()]


def scheme_of(schemes: Sequence[CompressedScheme], path: str) -> CompressedScheme:
    """The scheme of a module: one that names it goes before one for its class."""
    named = (scheme for scheme in schemes if scheme.names_module(path))
    by_class = (scheme for scheme in schemes if scheme.by_class)
    return next(named, None) or next(by_class, UNKNOWN_SCHEME)


def _scheme(group: Settings) -> CompressedScheme:
    group.text("format", allowed=FORMATS, why=_OTHER_LAYOUT)
    targets = group.get("targets") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise group.refused("targets", targets, "a list of names")
    names = frozenset(target for target in targets if not target.startswith(REGEX))
    patterns = [target.removeprefix(REGEX) for target in targets if target.startswith(REGEX)]
    weights = group.child("weights") or Settings({})
    return CompressedScheme(
        names=names,
        patterns=tuple(NamePattern(pattern, "quantization_config's targets") for pattern in patterns),
        # Classes start with a capital; torch modules are never named like that.
        by_class=any(name[:1].isupper() for name in names),
        num_bits=weights.integer("num_bits", allowed=range(1, 9)),
        symmetric=weights.flag("symmetric"),
        block=_block(weights),
        inputs=_inputs(group, weights),
    )


def _block(weights: Settings) -> tuple[int, int] | None:
    strategy = weights.text("strategy", allowed=STRATEGIES)
    if strategy == "block":
        return weights.pair("block_structure")
    group_size = weights.group_size("group_size")
    return None if group_size in (None, -1) else (1, group_size)


def _inputs(group: Settings, weights: Settings) -> InputRounding | None:
    """Integers times integers are computed as the checkpoint says. Where that is not what it asks for, inputs stay in
    the compute dtype, which is at least as exact."""
    if group.get("output_activations") is not None:
        tell_ignored("activations", "output_activations")
    inputs = group.child("input_activations")
    if inputs is None:
        return None
    rounding = _INPUT_ROUNDINGS.get((inputs.get("strategy"), inputs.get("dynamic") or False))
    if rounding is None or not _is_int8(inputs) or not _is_int8(weights) or _block(weights) is not None:
        tell_ignored("activations", "input_activations")
        return None
    return rounding


def _is_int8(settings: Settings) -> bool:
    """Whether they ask for symmetric integers of eight bits; integers and symmetry are the library's defaults."""
    kind, symmetric = settings.get("type"), settings.get("symmetric")
    return settings.get("num_bits") == 8 and kind in (None, "int") and symmetric in (None, True)
