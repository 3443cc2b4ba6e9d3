"""A tokenizer as llguidance is shown it: which token ids stand for which bytes."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from graftlm.errors import InvalidRequest

# In the name of a token that no text may stand for: a noncharacter, which no text has.
_NO_TEXT = "\ufdd0"
_LARK_PIECE = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?P<name><[^<>\s]+>)')


class Vocabulary:
    """llguidance's tokenizer for requests of one vocabulary, and the grammars compiled for it, the least recently used
    first.

    In llguidance's reading of a tokenizer.json, `<added>` tokens are special whatever the file says, text that is
    forced may be spelled with special tokens, and its own parser then refuses those. Here special tokens have names
    that no text contains, and the others are tokens like any of the vocabulary.

    Args:
        num_tokens: the tokenizer's. vocab_size: the number of logits.
        end_token_ids: allowed where a grammar may end. llguidance wants one: where there is none, it is given a token
            that no logits have.

    Raises:
        InvalidRequest: llguidance has no use for such a tokenizer.
    """

    def __init__(self, tokenizer_json: str, *, num_tokens: int, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        content: dict[str, Any] = json.loads(tokenizer_json)
        self.matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._special = _rename_special(content)
        ends = sorted(token_id for token_id in end_token_ids if token_id < num_tokens)
        if not ends:
            ends = [num_tokens]
            _add_special(content, num_tokens)
        size = max(vocab_size, num_tokens, ends[-1] + 1)
        try:
            self.tokenizer = LLTokenizer(json.dumps(content), n_vocab=size, eos_token=ends)
        except ValueError as cause:
            raise InvalidRequest(
                "structured output cannot be had with this model's tokenizer", param="structured", got=str(cause)[:200]
            ) from cause

    def with_ids(self, lark: str) -> str:
        """A Lark grammar with the special tokens in it, `<|name|>`, named by their ids."""

        def by_id(piece: re.Match[str]) -> str:
            token_id = self._special.get(piece["name"] or "")
            return piece[0] if token_id is None else f"<[{token_id}]>"

        return _LARK_PIECE.sub(by_id, lark)


def _rename_special(content: dict[str, Any]) -> dict[str, int]:
    """Hide the names of special tokens from text, and make the other `<added>` tokens ordinary ones.

    Returns: the ids of those that are special now, by their names until then.
    """
    special: dict[str, int] = {}
    vocab = content["model"].get("vocab")
    kept = []
    for token in content["added_tokens"]:
        name, token_id = token["content"], token["id"]
        if not token["special"] and not (name.startswith("<") and name.endswith(">")):
            kept.append(token)
        elif not token["special"] and isinstance(vocab, dict) and _spells_itself(name):
            vocab[name] = token_id
        else:
            special[name] = token_id
            token["content"] = f"<{_NO_TEXT}{token_id}>"
            _rename(vocab, name, token)
            kept.append(token)
    content["added_tokens"] = kept
    return special


def _add_special(content: dict[str, Any], token_id: int) -> None:
    token = {"id": token_id, "content": f"<{_NO_TEXT}{token_id}>", "special": True}
    settings = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append({**token, **settings})
    vocab = content["model"].get("vocab")
    if isinstance(vocab, dict):
        vocab[token["content"]] = token_id


def _rename(vocab: Any, name: str, token: dict[str, Any]) -> None:
    """Give a token its new name in the vocabulary too; of what stands in none, the file's ids hold only if they do."""
    if isinstance(vocab, dict):
        vocab.pop(name, None)
        vocab[token["content"]] = token["id"]
    elif isinstance(vocab, list) and token["id"] < len(vocab):
        vocab[token["id"]][0] = token["content"]


def _spells_itself(name: str) -> bool:
    """Whether byte-level vocabularies and others write these characters as they are."""
    return name.isascii() and name.isprintable() and " " not in name
