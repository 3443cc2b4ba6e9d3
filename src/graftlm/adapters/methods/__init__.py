"""One file per PEFT method: each maps the method's config and tensors to changes of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graftlm.adapters.methods.adalora import compile_adalora
from graftlm.adapters.methods.boft import compile_boft
from graftlm.adapters.methods.c3a import compile_c3a
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.delora import compile_delora
from graftlm.adapters.methods.fourierft import compile_fourierft
from graftlm.adapters.methods.gralora import compile_gralora
from graftlm.adapters.methods.hira import compile_hira
from graftlm.adapters.methods.hra import compile_hra
from graftlm.adapters.methods.ia3 import compile_ia3
from graftlm.adapters.methods.ln_tuning import compile_ln_tuning
from graftlm.adapters.methods.loha import compile_loha
from graftlm.adapters.methods.lokr import compile_lokr
from graftlm.adapters.methods.lora import compile_lora
from graftlm.adapters.methods.miss import compile_miss
from graftlm.adapters.methods.oft import compile_oft
from graftlm.adapters.methods.prompt_tuning import compile_p_tuning, compile_prompt_tuning
from graftlm.adapters.methods.road import compile_road
from graftlm.adapters.methods.shira import compile_shira
from graftlm.adapters.methods.trainable_tokens import compile_trainable_tokens
from graftlm.adapters.methods.vblora import compile_vblora
from graftlm.adapters.methods.vera import compile_vera
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.errors import AdapterUnsupported
from graftlm.models.base_weights import BaseWeights

Compile = Callable[[Mapping[str, Any], ModuleTensors, BaseWeights], CompiledAdapter]

# peft_type -> how it is compiled.
METHODS: dict[str, Compile] = {
    "LORA": compile_lora,
    "ADALORA": compile_adalora,
    "C3A": compile_c3a,
    "DELORA": compile_delora,
    "FOURIERFT": compile_fourierft,
    "GRALORA": compile_gralora,
    "HIRA": compile_hira,
    "LOHA": compile_loha,
    "LOKR": compile_lokr,
    "MISS": compile_miss,
    "SHIRA": compile_shira,
    "VBLORA": compile_vblora,
    "VERA": compile_vera,
    "BOFT": compile_boft,
    "HRA": compile_hra,
    "IA3": compile_ia3,
    "LN_TUNING": compile_ln_tuning,
    "OFT": compile_oft,
    "PROMPT_TUNING": compile_prompt_tuning,
    "P_TUNING": compile_p_tuning,
    "ROAD": compile_road,
    "TRAINABLE_TOKENS": compile_trainable_tokens,
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
    "PREFIX_TUNING": "it starts from a key-value cache instead of tokens",
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


def find_method(peft_type: object) -> Compile:
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
