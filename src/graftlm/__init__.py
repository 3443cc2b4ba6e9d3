"""Graft: fine-tune LoRA-family adapters and serve hundreds of them on one base model, with the same tokens as PEFT."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# libgomp's waiting threads spin; beside any other busy process that costs a scheduler slice per layer. The count must
# be in the environment before torch loads the library.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if TYPE_CHECKING:
    from graftlm.adapters.merge import merge
    from graftlm.config import EngineConfig
    from graftlm.engine.async_llm import AsyncLLM
    from graftlm.engine.llm import LLM
    from graftlm.engine.outputs import CompletionOutput, RequestOutput, TokenLogprob
    from graftlm.engine.request_stream import RequestStream
    from graftlm.engine.sampling_params import SamplingParams
    from graftlm.engine.structured_output import StructuredOutput
    from graftlm.errors import GraftError

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "GraftError",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprob",
    "merge",
]

_MODULES = {
    "LLM": "graftlm.engine.llm",
    "AsyncLLM": "graftlm.engine.async_llm",
    "CompletionOutput": "graftlm.engine.outputs",
    "EngineConfig": "graftlm.config",
    "GraftError": "graftlm.errors",
    "RequestOutput": "graftlm.engine.outputs",
    "RequestStream": "graftlm.engine.request_stream",
    "SamplingParams": "graftlm.engine.sampling_params",
    "StructuredOutput": "graftlm.engine.structured_output",
    "TokenLogprob": "graftlm.engine.outputs",
    "merge": "graftlm.adapters.merge",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `graft --help` need not wait seconds for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
