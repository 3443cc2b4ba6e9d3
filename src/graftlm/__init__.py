"""Graft: fine-tune LoRA-family adapters and serve hundreds of them on one base model, with the same tokens as PEFT."""

import os

# libgomp's waiting threads spin; beside any other busy process that costs a scheduler slice per layer. The count must
# be in the environment before torch loads the library.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from graftlm.config import EngineConfig
from graftlm.engine.async_llm import AsyncLLM, RequestStream
from graftlm.engine.llm import LLM
from graftlm.engine.outputs import CompletionOutput, RequestOutput, TokenLogprob
from graftlm.engine.sampling_params import SamplingParams
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
    "TokenLogprob",
]
