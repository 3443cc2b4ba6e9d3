"""Text to token ids and back: tokenizer, chat template, incremental detokenising, stop strings."""

from graftlm.text.detokenizer import IncrementalDetokenizer
from graftlm.text.stop_strings import StopStringFilter
from graftlm.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["IncrementalDetokenizer", "StopStringFilter", "Tokenizer", "load_tokenizer"]
