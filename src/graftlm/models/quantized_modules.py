"""What was quantised while a model was loaded, counted for the log."""

from __future__ import annotations

from graftlm.quantization import Weight


class QuantizedModules:
    """A count of modules, of their weights and bytes. As text it is a sentence."""

    def __init__(self) -> None:
        self.num_modules = 0
        self.num_weights = 0
        self.num_bytes = 0
        self._num_cached = 0
        # In place of a set: it keeps the order.
        self._formats: dict[str, None] = {}

    def add(self, weight: Weight, *, is_cached: bool) -> None:
        """is_cached: whether it comes from an earlier start."""
        rows, columns = weight.shape
        self.num_modules += 1
        self.num_weights += rows * columns
        self.num_bytes += weight.num_bytes
        self._num_cached += is_cached
        self._formats[weight.format] = None

    def __str__(self) -> str:
        formats, per_weight = " and ".join(self._formats), self.num_bytes / self.num_weights
        return (
            f"{self.num_modules} modules are quantised to {formats}: {self.num_bytes / 2**20:.1f} MiB, "
            f"{per_weight:.4f} bytes per weight ({self._num_cached} of them from the cache)"
        )
