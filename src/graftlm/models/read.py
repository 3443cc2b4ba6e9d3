"""What a checkpoint holds, from its config: family, spec, and where adapters can attach."""

from __future__ import annotations

import logging
from dataclasses import replace

from graftlm.checkpoint import Checkpoint
from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import FAMILIES
from graftlm.models.family import Family
from graftlm.models.site import SiteMap, map_sites
from graftlm.models.spec import ModelSpec
from graftlm.models.tensors import NamedTensors, has_tied_head

logger = logging.getLogger(__name__)


def read_spec(checkpoint: Checkpoint) -> tuple[Family, ModelSpec]:
    """Family, under the names this member has, and spec of a checkpoint, from its config alone.

    Raises:
        CheckpointError: an unknown architecture, or a config value that is not supported.
    """
    model_type = checkpoint.config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise CheckpointError(
            "config.json: this model_type is not supported", got=repr(model_type), allowed=", ".join(sorted(FAMILIES))
        )
    config = ConfigReader(checkpoint.config)
    config.require("quantization_config", (None,))
    spec = family.spec(config)
    if unread := config.unread():
        logger.warning("config.json has keys Graft does not read: %s", ", ".join(unread))
    return family.named_for(spec), spec


def read_sites(checkpoint: Checkpoint) -> SiteMap:
    """Where adapters can attach to a checkpoint's model, without loading it.

    Raises:
        CheckpointError: as `read_spec`.
    """
    family, spec = read_spec(checkpoint)
    tensors = NamedTensors(checkpoint, family.names)
    return replace(map_sites(spec, family.names), tied_head=has_tied_head(tensors, family.names, tied=spec.head.tied))
