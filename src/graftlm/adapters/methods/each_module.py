"""The frame of methods that change the modules they target one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.saved_modules import SavedModules
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import TargetConfig
from graftlm.adapters.targets import check_target, select_targets
from graftlm.errors import AdapterUnsupported
from graftlm.models.base_weights import BaseWeights

logger = logging.getLogger(__name__)

# Tells the builder what happens to one module.
AdaptModule = Callable[[str, PatchBuilder], None]


def compile_each_module(
    method: str,
    config: TargetConfig,
    tensors: ModuleTensors,
    base: BaseWeights,
    *,
    role: str,
    adaptable: Collection[str],
    adapt: AdaptModule,
) -> CompiledAdapter:
    """Replaced modules, then `adapt` for each module with a tensor of `role`, then replaced biases.

    Args:
        method: its name, for people. role: the tensor that every adapted module has. adaptable: modules that the method
            is defined for.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    targets = select_targets(config, base.sites, adaptable)
    builder = PatchBuilder(base)
    saved = SavedModules(config, tensors, base, [builder])
    saved.replace_modules()
    adapted = tensors.modules_with(role)
    for module in adapted:
        check_target(config, base.sites, targets, module)
        if module == base.sites.head_path and saved.vocab_size is not None:
            raise AdapterUnsupported(f"{method} of the output head together with a resized vocabulary is not supported")
        adapt(module, builder)
        builder.describe(module, method)
    saved.replace_biases()
    if absent := sorted(targets - set(adapted)):
        # What PEFT does as well: a targeted module whose tensors are missing stays as the base has it.
        logger.warning("no tensors for %d targeted modules: %s", len(absent), ", ".join(absent[:5]))
    return CompiledAdapter(method=method, builder=builder, vocab_size=saved.vocab_size)
