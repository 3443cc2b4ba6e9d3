"""What a checkpoint holds, from its config: family, spec, and where adapters can attach."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from graftlm.checkpoint import Checkpoint
from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import FAMILIES, REFUSED
from graftlm.models.family import Family
from graftlm.models.site import SiteMap, map_sites
from graftlm.models.spec import ModelSpec
from graftlm.models.tensors import NamedTensors, has_tied_head

logger = logging.getLogger(__name__)

# Keys that sound as if they changed what is computed, but for those that say how fast, or how it was trained.
_ARITHMETIC = re.compile(
    r"rope|rotary|attn|attention|scal|window|norm|bias|alibi|soft_?cap|multiplier|position_embed|expert|layer_types"
)
_NOT_ARITHMETIC = re.compile(r"drop|fusion|flash|implementation|fp32|aux_loss")


def read_spec(checkpoint: Checkpoint) -> tuple[Family, ModelSpec]:
    """Family, under the names this member has, and spec of a checkpoint, from its config alone.

    Raises:
        CheckpointError: an unknown architecture, a config value that is not supported, or an unknown key that sounds as
            if it mattered.
    """
    family = _find_family(checkpoint)
    config = ConfigReader(checkpoint.config)
    spec = family.spec(config)
    _report_unread(config.unread())
    return family.named_for(spec), spec


def _find_family(checkpoint: Checkpoint) -> Family:
    model_type = checkpoint.config.get("model_type")
    family = FAMILIES.get(str(model_type))
    has_code = bool(checkpoint.config.get("auto_map"))
    if str(model_type) in REFUSED:
        raise CheckpointError(
            f"config.json: {model_type} is not supported: {REFUSED[str(model_type)]}",
            got=repr(model_type),
            allowed=", ".join(sorted(FAMILIES)),
        )
    if family is None:
        raise CheckpointError(
            "config.json: this model_type is not supported",
            got=repr(model_type),
            allowed=", ".join(sorted(FAMILIES)),
            do="the code that comes with the checkpoint (auto_map) is never executed" if has_code else None,
        )
    if has_code:
        logger.warning(
            "config.json names code of its own (auto_map): it is not executed, the model is served as %s", model_type
        )
    return family


def _report_unread(keys: Sequence[str]) -> None:
    """Refuse keys that may change what is computed; mention the others."""
    suspicious = [key for key in keys if _ARITHMETIC.search(key) and not _NOT_ARITHMETIC.search(key)]
    if suspicious:
        raise CheckpointError(
            "config.json has keys Graft does not know that may change what the model computes",
            got=", ".join(suspicious),
            do="remove them if the model was trained without them",
        )
    if keys:
        logger.warning("config.json has keys Graft does not read: %s", ", ".join(keys))


def read_sites(checkpoint: Checkpoint) -> SiteMap:
    """Where adapters can attach to a checkpoint's model, without loading it.

    Raises:
        CheckpointError: as `read_spec`.
    """
    family, spec = read_spec(checkpoint)
    tensors = NamedTensors(checkpoint, family.names)
    return replace(map_sites(spec, family.names), tied_head=has_tied_head(tensors, family.names, tied=spec.head.tied))
