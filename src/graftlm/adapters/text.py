"""The text side of an adapter: its own tokenizer, chat template and end tokens, when its folder has them.

Trainers habitually save the base's tokenizer beside an adapter. Equal files are loaded once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from graftlm.checkpoint.json_file import read_json_object
from graftlm.errors import AdapterCorrupt, CheckpointError
from graftlm.text import Tokenizer, load_tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# A tokenizer of 262k entries takes 33 MB; nothing honest takes more than this.
MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class AdapterText:
    """tokenizer: None for the base's. end_token_ids: None for the base's."""

    tokenizer: Tokenizer | None = None
    end_token_ids: frozenset[int] | None = None


class AdapterTexts:
    """Reads the text side of adapters over one base.

    Args:
        base: the base's tokenizer. base_folder: where its files are, if they are files an adapter may have copies of.
    """

    def __init__(self, base: Tokenizer, base_folder: Path | None) -> None:
        self._base = base
        self._by_digest: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()
        if base_folder is not None and (digest := _digest(base_folder)) is not None:
            self._by_digest[digest] = base

    def read(self, folder: Path) -> AdapterText:
        """The text side of the adapter in `folder`.

        Raises:
            AdapterCorrupt: its files cannot be read. Code in the folder is never executed.
        """
        try:
            return AdapterText(tokenizer=self._tokenizer(folder), end_token_ids=_end_token_ids(folder))
        except (CheckpointError, OSError, ValueError) as cause:
            raise AdapterCorrupt("the adapter's own tokenizer files cannot be read", got=str(cause)[:200]) from cause

    def _tokenizer(self, folder: Path) -> Tokenizer | None:
        digest = _digest(folder)
        if digest is None:
            return None
        known = self._by_digest.get(digest)
        if known is None:
            # Whoever else read the same ones meanwhile: they stay one object.
            known = self._by_digest.setdefault(digest, self._load(folder))
        return None if known is self._base else known

    def _load(self, folder: Path) -> Tokenizer:
        """Without a tokenizer.json the folder can only bring a chat template for the base's tokenizer."""
        if (folder / "tokenizer.json").is_file():
            own = load_tokenizer(folder)
            return own if own.chat_template is not None else own.with_chat_template(self._base.chat_template)
        template = _chat_template(folder)
        return self._base if template is None else self._base.with_chat_template(template)


def _digest(folder: Path) -> str | None:
    """One digest for all tokenizer files; None when there are none."""
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        return None
    digest = hashlib.sha256()
    for path in present:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise AdapterCorrupt(f"{path.name} is too large", got=path.stat().st_size, allowed=str(MAX_FILE_BYTES))
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _chat_template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else None


def _end_token_ids(folder: Path) -> frozenset[int] | None:
    path = folder / "generation_config.json"
    ids = read_json_object(path, CheckpointError).get("eos_token_id") if path.is_file() else None
    if ids is None or ids == []:
        return None
    listed = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in listed):
        raise CheckpointError("generation_config.json: eos_token_id is not made of token ids", got=repr(ids)[:100])
    return frozenset(listed)
