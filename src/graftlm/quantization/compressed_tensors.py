"""Checkpoints that the compressed-tensors library (llm-compressor, vLLM) writes.

Which of its formats a module has shows in its tensors, for a matrix of shape [N, K] with G groups:
weight_packed int32 [N, K * b / 32]: integers of b bits, lowest bits first, each 2**(b - 1) more than it means;
weight_packed uint8 [N, K / 2]: four-bit floats, the even column in the low half, scales float8_e4m3fn divided by
weight_global_scale (NVFP4) or exponents (MXFP4);
weight int8 [N, K] or float8_e4m3fn [N, K]: plain values.
Beside them weight_scale, one for all, per row, group or block; weight_zero_point; weight_g_idx; weight_shape.
w = (value - zero point) * scale
Where the config rounds inputs to eight-bit integers too, input_scale is theirs, one for all, or each token has its own.

Source: compressed-tensors 0.20, compressors/ and quantization/lifecycle/forward_helpers.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.kernels import ops
from graftlm.quantization.activation_scales import activation_scale_names
from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.compressed_schemes import CompressedScheme, read_schemes, scheme_of
from graftlm.quantization.disagreements import Disagreements
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.grouped_integers import GroupedIntegers
from graftlm.quantization.integer_groups import consecutive_groups, read_group_index
from graftlm.quantization.packed_codes import PackedCodes
from graftlm.quantization.quantized_inputs import InputQuantizer, StaticInputs, TokenInputs
from graftlm.quantization.row_weight import RowWeight
from graftlm.quantization.scale_grid import ScaleGrid
from graftlm.quantization.scale_tensor import read_scale_grid
from graftlm.quantization.scaled_e2m1 import ScaledE2M1
from graftlm.quantization.scaled_float8 import ScaledFloat8
from graftlm.quantization.stored_module import StoredModule, present_names
from graftlm.quantization.w8a8_weight import W8A8Weight
from graftlm.quantization.word_packing import WORD_PACKINGS, WordPacking

ROLES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "weight_global_scale",
)
INPUT_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INPUT_ZERO_DTYPES = (torch.int8, *INPUT_SCALE_DTYPES)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class CompressedTensorsFormat:
    """A `WeightFormat`.

    config: quantization_config.

    Raises:
        CheckpointError: as `read_schemes`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._schemes = read_schemes(config)
        self._disagreements = Disagreements()

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        return bool(present_names(tensors, path, ["weight_packed", "weight_scale"]))

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
    ) -> RowWeight:
        module = StoredModule(tensors, path, device)
        scheme = scheme_of(self._schemes, path)
        if module.has("weight_packed"):
            packed = module.read("weight_packed", dtypes=[torch.int32, torch.uint8])
            if packed.dtype == torch.uint8:
                return self._floats4(module, packed, scheme, shape, dtype)
            grid = self._grid(module, scheme, shape, parts)
            return self._packed_integers(module, packed, grid, scheme, shape, dtype)
        values = module.read("weight", dtypes=[torch.int8, *FLOAT8_DTYPES], shapes=[shape])
        grid = self._grid(module, scheme, shape, parts)
        if values.dtype == torch.int8:
            inputs = self._input_quantizer(module, scheme, grid)
            if inputs is not None:
                return W8A8Weight(codes=values, scale=grid.per_row(grid.scale), inputs=inputs, dtype=dtype)
            # Flipping the sign bit adds 128.
            codes = PackedCodes.pack(values.view(torch.uint8) ^ 128, 8)
            packing = WordPacking(bits=8, padded=False)
            return self._integers(module, codes, packing, grid, scheme, dtype)
        _refuse_zero_point(module)
        return ScaledFloat8(values=values, grid=grid, dtype=dtype)

    def _input_quantizer(
        self, module: StoredModule, scheme: CompressedScheme, grid: ScaleGrid
    ) -> InputQuantizer | None:
        """How a module's inputs are rounded, for eight-bit integers; None where they stay as they are."""
        if scheme.inputs is None:
            return None
        columns = grid.columns
        grouped = columns.size < columns.columns
        if grouped or columns.columns > ops.MAX_INTEGER_COLUMNS or _has_zero_points(module):
            self._disagreements.tell(
                "input_activations", module.path, config="int8", tensors="weights that are not multiplied as integers"
            )
            return None
        return TokenInputs() if scheme.inputs == "token" else _static_inputs(module)

    def _grid(
        self, module: StoredModule, scheme: CompressedScheme, shape: tuple[int, int], parts: Sequence[int]
    ) -> ScaleGrid:
        return read_scale_grid(
            module,
            "weight_scale",
            shape=shape,
            block=scheme.block,
            parts=parts,
            disagreements=self._disagreements,
        )

    def _floats4(
        self,
        module: StoredModule,
        packed: Tensor,
        scheme: CompressedScheme,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> ScaledE2M1:
        rows, columns = shape
        if tuple(packed.shape) != (rows, columns // 2) or columns % 2:
            raise module.misshapen("weight_packed", f"[{rows}, {columns} / 2]")
        _refuse_zero_point(module)
        scale = module.read("weight_scale", dtypes=[torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
        if scale.ndim != 2 or scale.shape[0] != rows:
            raise module.misshapen("weight_scale", f"[{rows}, groups]")
        groups = consecutive_groups(
            module,
            "weight_scale",
            columns=columns,
            num_groups=scale.shape[1],
            group_size=None if scheme.block is None else scheme.block[1],
            disagreements=self._disagreements,
        )
        return ScaledE2M1(
            codes=PackedCodes.from_bytes(packed, columns, 4),
            scale=scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale,
            global_scale=_global_scale(module, needed=scale.dtype == torch.float8_e4m3fn),
            columns=groups,
            dtype=dtype,
        )

    def _packed_integers(
        self,
        module: StoredModule,
        packed: Tensor,
        grid: ScaleGrid,
        scheme: CompressedScheme,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> GroupedIntegers:
        if module.has("weight_shape"):
            stored = module.read("weight_shape", dtypes=[torch.int64, torch.int32], shapes=[(2,)])
            if tuple(stored.tolist()) != shape:
                raise CheckpointError(
                    f"tensor {module.name('weight_shape')} contradicts the model's config",
                    got=stored.tolist(),
                    allowed=str(list(shape)),
                )
        packing = self._packing(module, packed, scheme, shape)
        codes = packing.codes(packed, shape[1])
        return self._integers(module, codes, packing, grid, scheme, dtype)

    def _packing(
        self, module: StoredModule, packed: Tensor, scheme: CompressedScheme, shape: tuple[int, int]
    ) -> WordPacking:
        """The way of packing that explains how much is stored."""
        rows, columns = shape
        possible = [packing for packing in WORD_PACKINGS if tuple(packed.shape) == (rows, packing.num_words(columns))]
        asked = [packing for packing in possible if packing.bits == scheme.num_bits]
        if not asked and len({packing.bits for packing in possible}) != 1:
            raise module.misshapen(
                "weight_packed", f"[{rows}, the words of {columns} codes of {scheme.num_bits or '1 to 8'} bits]"
            )
        if not asked and scheme.num_bits is not None:
            self._disagreements.tell("num_bits", module.path, config=scheme.num_bits, tensors=possible[0].bits)
        zero_words = _packed_zero_rows(module)
        fitting = [packing for packing in asked or possible if zero_words in (None, packing.num_words(rows))]
        if not fitting:
            raise module.misshapen("weight_zero_point", f"[the words of {rows} codes, groups]")
        return fitting[0]

    def _integers(
        self,
        module: StoredModule,
        codes: PackedCodes,
        packing: WordPacking,
        grid: ScaleGrid,
        scheme: CompressedScheme,
        dtype: torch.dtype,
    ) -> GroupedIntegers:
        rows = codes.stream.shape[0]
        num_groups = grid.scale.shape[1]
        index = read_group_index(module, "weight_g_idx", columns=codes.columns, num_groups=num_groups)
        columns = ColumnGroups(columns=codes.columns, size=grid.columns.size, index=index)
        if scheme.symmetric is False or module.has("weight_zero_point"):
            zero = _zero_points(module, packing, grid)
        else:
            zero = torch.full((rows, num_groups), 1 << (packing.bits - 1), dtype=torch.uint8, device=grid.scale.device)
        return GroupedIntegers(codes=codes, scale=grid.per_row(grid.scale), zero=zero, columns=columns, dtype=dtype)


def _has_zero_points(module: StoredModule) -> bool:
    """Whether any is not zero: some versions save them for symmetric weights too."""
    return module.has("weight_zero_point") and bool(module.read("weight_zero_point", dtypes=[torch.int8]).any())


def _static_inputs(module: StoredModule) -> StaticInputs:
    scale = module.read("input_scale", dtypes=INPUT_SCALE_DTYPES, shapes=[(1,), ()]).reshape(1)
    if not 0 < float(scale) < float("inf"):
        raise CheckpointError(
            f"tensor {module.name('input_scale')} is no scale", got=float(scale), allowed="a positive number"
        )
    role = "input_zero_point"
    if module.has(role) and bool((zero := module.read(role, dtypes=INPUT_ZERO_DTYPES)).float().any()):
        raise CheckpointError(
            f"tensor {module.name(role)} contradicts quantization_config: inputs are symmetric there",
            got=zero.tolist(),
            allowed="zeros, or none",
        )
    return StaticInputs(scale=scale)


def _packed_zero_rows(module: StoredModule) -> int | None:
    """How many words a column of packed zero points takes; None where there are no packed ones."""
    if not module.has("weight_zero_point"):
        return None
    zeros = module.read("weight_zero_point", dtypes=[torch.int32, torch.int8])
    return zeros.shape[0] if zeros.dtype == torch.int32 and zeros.ndim == 2 else None


def _zero_points(module: StoredModule, packing: WordPacking, grid: ScaleGrid) -> Tensor:
    """uint8 [N, G]: what is stored, with the codes' own shift."""
    rows, num_groups = grid.row_groups.shape[0], grid.scale.shape[1]
    stored = module.read("weight_zero_point", dtypes=[torch.int32, torch.int8])
    if stored.dtype == torch.int32:
        if tuple(stored.shape) != (packing.num_words(rows), num_groups):
            raise module.misshapen("weight_zero_point", str([packing.num_words(rows), num_groups]))
        return packing.codes(stored.T, rows).unpack().T.contiguous()
    if tuple(stored.shape) != module.shape("weight_scale"):
        raise module.misshapen("weight_zero_point", f"{list(module.shape('weight_scale'))}, as weight_scale")
    shifted = stored.to(torch.int16).reshape(grid.scale.shape) + (1 << (packing.bits - 1))
    if int(shifted.min()) < 0 or int(shifted.max()) >= 1 << packing.bits:
        raise CheckpointError(
            f"tensor {module.name('weight_zero_point')} holds values that are no zero points",
            got=f"{int(stored.min())} to {int(stored.max())}",
            allowed=f"what {packing.bits} bits hold",
        )
    return grid.per_row(shifted.to(torch.uint8))


def _refuse_zero_point(module: StoredModule) -> None:
    """Floats have none; some versions save zeros."""
    if not module.has("weight_zero_point"):
        return
    stored = module.read("weight_zero_point", dtypes=[torch.int8, torch.float32, torch.bfloat16, *FLOAT8_DTYPES])
    if bool(stored.float().any()):
        raise CheckpointError(
            f"tensor {module.name('weight_zero_point')}: zero points of float codes are not supported",
            allowed="zeros, or none",
        )


def _global_scale(module: StoredModule, *, needed: bool) -> Tensor:
    """float32 [1], positive."""
    if not needed and not module.has("weight_global_scale"):
        return torch.ones(1, device=module.device)
    stored = module.read("weight_global_scale", dtypes=[torch.float32], shapes=[(), (1,)]).reshape(1)
    if not 0 < float(stored) < float("inf"):
        raise CheckpointError(
            f"tensor {module.name('weight_global_scale')} is no scale", got=float(stored), allowed="a positive number"
        )
    return stored
