"""A quantization_config that says something else than the tensors."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Disagreements:
    """Tells of each setting that the tensors contradict, once per checkpoint. The tensors win: libraries differ in what
    they write into the config, while the tensors are what was trained."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, setting: str, path: str, *, config: object, tensors: object) -> None:
        """setting: the config's key. path: the module where it shows. config, tensors: what either says."""
        if setting not in self._told:
            self._told.add(setting)
            logger.warning(
                "quantization_config says %s = %s; the tensors of %s say %s, and count (other modules may differ too)",
                setting,
                config,
                path,
                tensors,
            )
