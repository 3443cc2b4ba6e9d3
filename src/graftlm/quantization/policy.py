"""What becomes of a checkpoint's matrices when they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.config import Quantization
from graftlm.errors import ConfigurationError
from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.quantization.format import Quantizer
from graftlm.quantization.methods import quantization_of


@dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """How linear layers are held in memory. Without arguments: as they are stored.

    quantization: name of the quantiser; None for none.
    keep_stored: whether a matrix that is stored quantised stays so; else it is dequantised first.
    quantize_head: whether the output head is quantised too, and the token table where they are one matrix.
    skipped: modules that are not quantised: whole parts of their paths, as in `EngineConfig.quantize_skip`.
    int8_threshold: as in `EngineConfig`.
    """

    quantization: str | None = None
    keep_stored: bool = True
    quantize_head: bool = False
    skipped: tuple[str, ...] = ()
    int8_threshold: float | None = None

    def quantizer(self, path: str) -> Quantizer | None:
        """What the linear module `path` is quantised with; None where it is not."""
        return None if self.quantization is None or self.skips(path) else QUANTIZERS[self.quantization]

    def skips(self, path: str) -> bool:
        """Whether `skipped` names the module `path`."""
        return any(_names(entry, path) for entry in self.skipped)

    def check_skipped(self, paths: Collection[str]) -> None:
        """
        Args:
            paths: of all linear modules and the token table.

        Raises:
            ConfigurationError: an entry of `skipped` names none of them.
        """
        unknown = [entry for entry in self.skipped if not any(_names(entry, path) for path in paths)]
        if unknown:
            ends = dict.fromkeys(path.rpartition(".")[2] for path in paths)
            raise ConfigurationError(
                "quantize_skip names modules this model does not have",
                got=", ".join(map(repr, unknown))[:200],
                allowed=f"a path or a part of one, such as {', '.join(list(ends)[:10])}",
            )


def _names(entry: str, path: str) -> bool:
    """Whether `entry` is `path`, or whole parts of it in a row."""
    return f".{entry}." in f".{path}."


def choose_policy(
    quantization: Quantization | None,
    *,
    stored: Mapping[str, Any] | None,
    quantize_head: bool = False,
    skipped: Sequence[str] = (),
    requantize: bool = False,
) -> LoadPolicy:
    """The policy for one checkpoint.

    Args:
        quantization, quantize_head, requantize: as in `EngineConfig`. skipped: its quantize_skip.
        stored: the checkpoint's `quantization_config`; None where nothing in it is quantised.

    Raises:
        ConfigurationError: the checkpoint is already quantised, and not so.
    """
    if quantization is None:
        return LoadPolicy()
    if quantization == "none":
        return LoadPolicy(keep_stored=False)
    if stored is not None and not requantize:
        own = quantization_of(stored) or str(stored.get("quant_method"))
        if own != quantization:
            raise ConfigurationError(
                "the checkpoint is already quantised, and to something else than was asked for",
                got=f"quantization={quantization!r} for a checkpoint in {own}",
                do="leave quantization out to serve it as it is, or add requantize, and both errors add up",
            )
        for option, given in (("quantize_head", quantize_head), ("quantize_skip", skipped)):
            if given:
                raise ConfigurationError(
                    "the checkpoint is already quantised, and says of which modules", do=f"leave {option} out"
                )
        return LoadPolicy()
    return LoadPolicy(quantization=quantization, keep_stored=False, quantize_head=quantize_head, skipped=tuple(skipped))
