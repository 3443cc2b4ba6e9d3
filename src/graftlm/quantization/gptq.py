"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them: which settings and tensors a module has, in either version.

w[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n]), see `gptq_layout`

Source: AutoGPTQ 0.7, nn_modules/qlinear/qlinear_cuda_old.py; GPTQModel's QuantizeConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlm.quantization.activation_scales import activation_scale_names
from graftlm.quantization.disagreements import Disagreements
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.gptq_layout import BITS, ROLES
from graftlm.quantization.grouped_integers import GroupedIntegers
from graftlm.quantization.integer_groups import read_column_groups
from graftlm.quantization.name_pattern import NamePattern
from graftlm.quantization.packed_codes import PackedCodes
from graftlm.quantization.settings import Settings
from graftlm.quantization.stored_module import StoredModule, present_names

# What a stored zero point lacks.
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD = "lm_head"
SKIP, OVERRIDE = "-:", "+:"


@dataclass(frozen=True, kw_only=True)
class GPTQSettings:
    """What the config says about a module. Sizes are None where it is silent. in_order: that it has no act-order."""

    bits: int | None
    group_size: int | None
    symmetric: bool
    in_order: bool

    @classmethod
    def read(cls, settings: Settings, default: GPTQSettings | None = None) -> GPTQSettings:
        bits = settings.integer("bits", allowed=BITS)
        group_size = settings.group_size("group_size")
        symmetric, act_order = settings.flag("sym"), settings.flag("desc_act")
        if default is None:
            return cls(bits=bits, group_size=group_size, symmetric=bool(symmetric), in_order=act_order is False)
        return cls(
            bits=default.bits if bits is None else bits,
            group_size=default.group_size if group_size is None else group_size,
            symmetric=default.symmetric if symmetric is None else symmetric,
            in_order=default.in_order if act_order is None else not act_order,
        )


@dataclass(frozen=True, kw_only=True)
class GPTQRule:
    """An entry of `dynamic`: settings for the modules whose names it matches, or None where they are left alone."""

    pattern: NamePattern
    settings: GPTQSettings | None


class GPTQFormat:
    """A `WeightFormat`.

    config: quantization_config or quantize_config.json.

    Raises:
        CheckpointError: an unknown number of bits, a layout made for one kernel, a broken rule.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = Settings(config)
        if settings.flag("is_marlin_format"):
            raise settings.refused("is_marlin_format", True, "false", do=_OTHER_LAYOUT)
        checkpoint_format = settings.text("checkpoint_format", "format", allowed=ZERO_OFFSETS, why=_OTHER_LAYOUT)
        settings.text("pack_dtype", allowed=["int32"])
        self._zero_offset = ZERO_OFFSETS[checkpoint_format or "gptq"]
        self._default = GPTQSettings.read(settings)
        self._rules = [_rule(key, value, self._default) for key, value in _dynamic(settings).items()]
        self._plain_head = settings.flag("lm_head") is False
        self._disagreements = Disagreements()

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        return bool(present_names(tensors, path, ["qweight"]))

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        return present_names(tensors, path, ROLES) | activation_scale_names(tensors, path)

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> GroupedIntegers:
        module = StoredModule(tensors, path, device)
        settings = self._settings(path)
        rows, columns = shape
        bits = self._bits(module, settings.bits, shape)
        words = module.read("qweight", dtypes=[torch.int32], shapes=[(_num_words(columns, bits), rows)])
        num_groups = module.shape("scales")[0] if module.shape("scales") else 0
        scales = module.read("scales", dtypes=SCALE_DTYPES, shapes=[(num_groups, rows)])
        zeros = module.read("qzeros", dtypes=[torch.int32], shapes=[(num_groups, _num_words(rows, bits))])
        groups = read_column_groups(
            module,
            "g_idx",
            "scales",
            columns=columns,
            num_groups=num_groups,
            group_size=settings.group_size,
            disagreements=self._disagreements,
        )
        if settings.in_order and groups.index is not None:
            self._disagreements.tell("desc_act", path, config=False, tensors="groups in activation order")
        if self._plain_head and path == HEAD:
            self._disagreements.tell("lm_head", path, config=False, tensors="quantised")
        return GroupedIntegers(
            codes=PackedCodes.from_words(words.T, columns, bits),
            scale=scales.T.contiguous(),
            zero=self._zero_points(module, PackedCodes.from_words(zeros, rows, bits), settings.symmetric),
            columns=groups,
            dtype=dtype,
        )

    def _settings(self, path: str) -> GPTQSettings:
        rule = next((rule for rule in self._rules if rule.pattern.matches(path)), None)
        if rule is None:
            return self._default
        if rule.settings is None:
            self._disagreements.tell("dynamic", path, config="not quantised", tensors="quantised")
            return self._default
        return rule.settings

    def _bits(self, module: StoredModule, asked: int | None, shape: tuple[int, int]) -> int:
        rows, columns = shape
        stored = module.shape("qweight")
        if asked is not None and stored == (_num_words(columns, asked), rows):
            return asked
        fitting = [bits for bits in BITS if stored == (_num_words(columns, bits), rows)]
        if len(fitting) != 1:
            expected = [[_num_words(columns, bits), rows] for bits in BITS if asked in (None, bits)]
            raise module.misshapen("qweight", " or ".join(map(str, expected)))
        if asked is not None:
            self._disagreements.tell("bits", module.path, config=asked, tensors=fitting[0])
        return fitting[0]

    def _zero_points(self, module: StoredModule, stored: PackedCodes, symmetric: bool) -> Tensor:
        """uint8 [N, G]. Symmetric quantisation puts zero in the middle: where it does so without an offset, there is
        none, whatever the config says."""
        codes = stored.unpack()
        middle = 1 << (stored.bits - 1)
        offset = self._zero_offset
        is_middle = bool((codes == codes[0, 0]).all()) and int(codes[0, 0]) in (middle, middle - 1)
        if symmetric and not is_middle:
            self._disagreements.tell("sym", module.path, config=True, tensors="zero points that are not the middle")
        elif symmetric:
            offset = middle - int(codes[0, 0])
            if offset != self._zero_offset:
                names = {value: name for name, value in ZERO_OFFSETS.items()}
                self._disagreements.tell(
                    "checkpoint_format", module.path, config=names[self._zero_offset], tensors=names[offset]
                )
        # A zero point of 0 is stored as all ones in version 1.
        return ((codes + offset) & (2 * middle - 1)).T.contiguous()


_OTHER_LAYOUT = "use the checkpoint in the plain layout; layouts made for one GPU kernel are not read"


def _num_words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _dynamic(settings: Settings) -> Mapping[str, object]:
    """The entries of `dynamic` in their order: the first that matches counts."""
    value = settings.get("dynamic")
    if value is None or value is False:
        return {}
    if not isinstance(value, Mapping):
        raise settings.refused("dynamic", value, "an object of patterns")
    return value


def _rule(key: str, value: object, default: GPTQSettings) -> GPTQRule:
    pattern = NamePattern(key.removeprefix(SKIP).removeprefix(OVERRIDE), "quantization_config.dynamic")
    if key.startswith(SKIP):
        return GPTQRule(pattern=pattern, settings=None)
    overrides = Settings(value, f"quantization_config.dynamic[{key!r}]")
    return GPTQRule(pattern=pattern, settings=GPTQSettings.read(overrides, default))
