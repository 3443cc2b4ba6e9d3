"""One file per PEFT method: each maps the method's config and tensors to changes of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.lora import compile_lora
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.models.base_weights import BaseWeights

Compile = Callable[[Mapping[str, Any], ModuleTensors, BaseWeights], CompiledAdapter]

# peft_type -> how it is compiled.
METHODS: dict[str, Compile] = {"LORA": compile_lora}
