"""FP8 checkpoints: an eight-bit float matrix and its scales.

weight float8_e4m3fn [N, K]; weight_scale_inv (DeepSeek, transformers) or weight_scale (vLLM, FBGEMM): one scale, one
per row [N, 1], one per block [ceil(N / r), ceil(K / c)], or one per matrix that was fused into this one.
w[n, k] = weight[n, k] * scale; weight_scale_inv is multiplied too, despite its name.

Source: DeepSeek-V3, inference/kernel.py, weight_dequant; transformers 5, integrations/finegrained_fp8.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graftlm.quantization.activation_scales import activation_scale_names, tell_ignored
from graftlm.quantization.disagreements import Disagreements
from graftlm.quantization.format import StoredTensors
from graftlm.quantization.scale_tensor import read_scale_grid
from graftlm.quantization.scaled_float8 import ScaledFloat8
from graftlm.quantization.settings import Settings
from graftlm.quantization.stored_module import StoredModule, present_names

SCALE_ROLES = ("weight_scale_inv", "weight_scale")
VALUE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class FP8Format:
    """A `WeightFormat`.

    config: quantization_config of quant_method fp8 or fbgemm_fp8.

    Raises:
        CheckpointError: a block size or an activation scheme that is none.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = Settings(config)
        self._block = settings.pair("weight_block_size")
        scheme = settings.text("activation_scheme", allowed=["dynamic", "static"])
        if scheme is not None:
            tell_ignored("activations", f"activation_scheme = {scheme}")
        self._disagreements = Disagreements()

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        return bool(present_names(tensors, path, SCALE_ROLES))

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        return present_names(tensors, path, ("weight", *SCALE_ROLES)) | activation_scale_names(tensors, path)

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> ScaledFloat8:
        module = StoredModule(tensors, path, device)
        values = module.read("weight", dtypes=VALUE_DTYPES, shapes=[shape])
        grid = read_scale_grid(
            module,
            next((role for role in SCALE_ROLES if module.has(role)), SCALE_ROLES[-1]),
            shape=shape,
            block=self._block,
            parts=parts,
            disagreements=self._disagreements,
        )
        return ScaledFloat8(values=values, grid=grid, dtype=dtype)
