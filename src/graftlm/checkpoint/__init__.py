"""Reading model files: Hugging Face folders, GGUF files, hub ids. Every kind becomes a `Checkpoint` with Hugging Face's
config keys and tensor names, so that nothing above knows which it was."""

from graftlm.checkpoint.checkpoint import Checkpoint
from graftlm.checkpoint.open import is_local_model, open_checkpoint

__all__ = ["Checkpoint", "is_local_model", "open_checkpoint"]
