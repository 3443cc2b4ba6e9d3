"""What jobs report, as scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graftlm.errors import ConfigurationError


class TensorBoardLog:
    """Writes a run for each job below a folder.

    Raises:
        ConfigurationError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as cause:
            raise ConfigurationError(
                "writing for TensorBoard needs the tensorboard library", do="pip install 'graftlm[train]'"
            ) from cause
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def add(self, job: str, metrics: Mapping[str, float]) -> None:
        """metrics: of one update, `step` among them."""
        if job not in self._writers:
            self._writers[job] = self._make(str(self._folder / job))
        for name, value in metrics.items():
            if name != "step":
                self._writers[job].add_scalar(name, value, int(metrics["step"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for writer in self._writers.values():
            writer.close()
