"""One file per PEFT method: each maps the method's config and tensors to changes of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.adapters import config as lora_config
from graftlm.adapters.methods import (
    adalora,
    boft,
    c3a,
    delora,
    fourierft,
    gralora,
    hira,
    hra,
    ia3,
    ln_tuning,
    loha,
    lokr,
    lora,
    miss,
    oft,
    prefix_tuning,
    prompt_tuning,
    road,
    shira,
    trainable_tokens,
    vblora,
    vera,
)
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import ConfigFields
from graftlm.errors import AdapterUnsupported
from graftlm.models.base_weights import BaseWeights

Compile = Callable[[Mapping[str, Any], ModuleTensors, BaseWeights], CompiledAdapter]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How adapters of one peft_type are compiled, and what is known of their config's fields."""

    compile: Compile
    fields: ConfigFields


# By peft_type.
METHODS: dict[str, Method] = {
    "LORA": Method(compile=lora.compile_lora, fields=lora_config.FIELDS),
    "ADALORA": Method(compile=adalora.compile_adalora, fields=adalora.FIELDS),
    "C3A": Method(compile=c3a.compile_c3a, fields=c3a.FIELDS),
    "DELORA": Method(compile=delora.compile_delora, fields=delora.FIELDS),
    "FOURIERFT": Method(compile=fourierft.compile_fourierft, fields=fourierft.FIELDS),
    "GRALORA": Method(compile=gralora.compile_gralora, fields=gralora.FIELDS),
    "HIRA": Method(compile=hira.compile_hira, fields=hira.FIELDS),
    "LOHA": Method(compile=loha.compile_loha, fields=loha.FIELDS),
    "LOKR": Method(compile=lokr.compile_lokr, fields=lokr.FIELDS),
    "MISS": Method(compile=miss.compile_miss, fields=miss.FIELDS),
    "SHIRA": Method(compile=shira.compile_shira, fields=shira.FIELDS),
    "VBLORA": Method(compile=vblora.compile_vblora, fields=vblora.FIELDS),
    "VERA": Method(compile=vera.compile_vera, fields=vera.FIELDS),
    "BOFT": Method(compile=boft.compile_boft, fields=boft.FIELDS),
    "HRA": Method(compile=hra.compile_hra, fields=hra.FIELDS),
    "IA3": Method(compile=ia3.compile_ia3, fields=ia3.FIELDS),
    "LN_TUNING": Method(compile=ln_tuning.compile_ln_tuning, fields=ln_tuning.FIELDS),
    "OFT": Method(compile=oft.compile_oft, fields=oft.FIELDS),
    "PREFIX_TUNING": Method(compile=prefix_tuning.compile_prefix_tuning, fields=prefix_tuning.FIELDS),
    "PROMPT_TUNING": Method(compile=prompt_tuning.compile_prompt_tuning, fields=prompt_tuning.PROMPT_TUNING_FIELDS),
    "P_TUNING": Method(compile=prompt_tuning.compile_p_tuning, fields=prompt_tuning.P_TUNING_FIELDS),
    "ROAD": Method(compile=road.compile_road, fields=road.FIELDS),
    "TRAINABLE_TOKENS": Method(compile=trainable_tokens.compile_trainable_tokens, fields=trainable_tokens.FIELDS),
}

# peft_type that PEFT knows and Graft does not serve -> why.
REFUSED_METHODS: dict[str, str] = {
    "ADAMSS": "its updates live in clusters of singular subspaces of the base's weights",
    "ADAPTION_PROMPT": "it adds gated attention over learned prompts inside the layers",
    "BEFT": "it trains biases that the base's layers do not have",
    "BONE": "PEFT has removed it; convert the adapter to MISS with an older PEFT",
    "CARTRIDGE": "it starts from a key-value cache instead of tokens",
    "CPT": "its learned prompt depends on labels of the training examples",
    "DEFT": "it projects the base's weights and changes their dense form",
    "FROD": "its dense updates rotate the base's weights",
    "GLORA": "it scales and shifts weights and biases of the base in dense form",
    "LILY": "its layers share experts that a router chooses",
    "MULTITASK_PROMPT_TUNING": "its prompt depends on a task id, which requests do not have",
    "OSF": "it replaces the base's weights by dense ones",
    "PEANUT": "its updates are not linear",
    "POLY": "it mixes skills by a task id, which requests do not have",
    "PSOFT": "it rotates principal subspaces of the base's weights",
    "PVERA": "its updates are distributions to sample from",
    "RANDLORA": "its updates are of full rank",
    "SHADOW": "it runs a second network beside the base",
    "SUPERTUNING": "its updates are sparse matrices",
    "TINYLORA": "its updates are built from singular vectors of the base's weights",
    "UNILORA": "its updates are random projections of one vector",
    "WAVEFT": "its dense updates come from a wavelet transform",
    "XLORA": "it weighs several adapters anew for every token",
}


def find_method(peft_type: object) -> Method:
    """How adapters of a peft_type are compiled.

    Raises:
        AdapterUnsupported: Graft does not serve them; the message says why, if PEFT knows them.
    """
    known = peft_type if isinstance(peft_type, str) else ""
    if known in METHODS:
        return METHODS[known]
    reason = f": {REFUSED_METHODS[known]}" if known in REFUSED_METHODS else ""
    raise AdapterUnsupported(
        f"this peft_type is not supported{reason}", got=repr(peft_type)[:200], allowed=", ".join(sorted(METHODS))
    )
