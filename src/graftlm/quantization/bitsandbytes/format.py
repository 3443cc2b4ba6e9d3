"""Checkpoints quantised with bitsandbytes, in which every module may be stored in its own way."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graftlm.errors import CheckpointError
from graftlm.quantization.bitsandbytes.config import BitsAndBytesConfig
from graftlm.quantization.bitsandbytes.eight_bit_format import EightBitFormat
from graftlm.quantization.bitsandbytes.eight_bit_weight import EightBitWeight
from graftlm.quantization.bitsandbytes.four_bit_format import FourBitFormat
from graftlm.quantization.bitsandbytes.four_bit_weight import FourBitWeight
from graftlm.quantization.format import StoredTensors

logger = logging.getLogger(__name__)


class BitsAndBytesFormat:
    """A `WeightFormat` for NF4, FP4 and int8, told apart by each module's tensors. A module without any of their
    tensors is stored in full precision, whatever the config's skip list says."""

    def __init__(self, config: BitsAndBytesConfig) -> None:
        self._config = config
        self._four_bit = FourBitFormat()
        self._eight_bit = EightBitFormat()
        self._contradiction_logged = False

    @property
    def quantization(self) -> str | None:
        """The name of the quantiser the config describes."""
        return self._config.quantization

    def stores(self, tensors: StoredTensors, path: str) -> bool:
        return self._four_bit.stores(tensors, path) or self._eight_bit.stores(tensors, path)

    def tensor_names(self, tensors: StoredTensors, path: str) -> frozenset[str]:
        return self._four_bit.tensor_names(tensors, path) | self._eight_bit.tensor_names(tensors, path)

    def read(
        self,
        tensors: StoredTensors,
        path: str,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[int] = (),
    ) -> FourBitWeight | EightBitWeight:
        kinds = [kind for kind in (self._four_bit, self._eight_bit) if kind.stores(tensors, path)]
        if len(kinds) != 1:
            raise CheckpointError(
                f"the tensors of {path} do not say how it is quantised",
                got=", ".join(sorted(self.tensor_names(tensors, path))) or "none",
                allowed="those of a 4-bit matrix, or those of an 8-bit one",
            )
        weight = kinds[0].read(tensors, path, shape=shape, dtype=dtype, device=device)
        if weight.quantization != self.quantization and not self._contradiction_logged:
            self._contradiction_logged = True
            logger.warning(
                "quantization_config says %s, the tensors of %s are %s; the tensors win, here and in other modules",
                self.quantization,
                path,
                weight.quantization,
            )
        return weight


def bitsandbytes_format(config: Mapping[str, Any]) -> BitsAndBytesFormat:
    """A `FormatReader` for `quant_method` "bitsandbytes"."""
    return BitsAndBytesFormat(BitsAndBytesConfig.parse(config))
