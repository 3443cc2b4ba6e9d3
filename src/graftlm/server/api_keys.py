"""API keys: what a server keeps of them, and what each allows. The keys themselves are kept nowhere.

A key is 32 random bytes, so one round of SHA-256 hides it: there is nothing to guess that a slow hash would protect.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.engine.tenant import Tenant
from graftlm.errors import ConfigurationError
from graftlm.server.callers import Caller
from graftlm.server.rate_limits import RateLimits

PREFIX = "graft-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
_FIELDS = ("sha256", "models", "admin", "metrics", "cache_group", *_LIMITS)


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """name: the key's, and its tenant's. digest: SHA-256 of the key, in hexadecimal."""

    name: str
    digest: str
    caller: Caller
    limits: RateLimits


def new_key() -> str:
    """A key that nobody has had before."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def find_key(keys: Sequence[ApiKey], key: str) -> ApiKey | None:
    """The entry of a key that a client has sent. How long it takes depends on how many entries there are, never on
    which of them it is or how nearly another matches."""
    digest = digest_of(key)
    matches = [entry for entry in keys if hmac.compare_digest(entry.digest, digest)]
    return matches[0] if matches else None


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """The entries of a file of keys, which is TOML:

        [keys.alice]
        sha256 = "…"                  # of the key; `graft keys create` prints it
        models = ["legal-*", "base"]  # patterns for the names it may use
        requests_per_minute = 60      # these three are optional: no limit without them
        tokens_per_minute = 20000
        concurrent_requests = 4
        admin = false                 # may it load and unload adapters?
        metrics = false               # may it read /metrics?
        cache_group = "alice"         # keys of one group share cached prompts; default: its own name

    Raises:
        ConfigurationError: says which key and which field is not usable.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as cause:
        raise ConfigurationError("the file of API keys is not TOML", got=str(cause)) from cause
    entries = content.pop("keys", {})
    if content or not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigurationError(
            "the file of API keys has another form", got=", ".join(map(repr, content)) or "keys", allowed="[keys.NAME]"
        )
    keys = tuple(_parse_key(name, entry) for name, entry in entries.items())
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigurationError("two API keys have one sha256", do="create a key for each")
    return keys


def check_key_name(name: str) -> None:
    """Raises ConfigurationError: this cannot be a key's name."""
    if _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            "this cannot be the name of an API key",
            got=repr(name)[:100],
            allowed="1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit",
        )


def _parse_key(name: str, entry: Mapping[str, Any]) -> ApiKey:
    check_key_name(name)
    if unknown := sorted(entry.keys() - set(_FIELDS)):
        close = difflib.get_close_matches(unknown[0], _FIELDS, n=1)
        raise ConfigurationError(
            f"API key {name} has a field that is none",
            got=unknown[0],
            allowed=", ".join(_FIELDS),
            do=f"write {close[0]}" if close else None,
        )
    digest, models = entry.get("sha256"), entry.get("models")
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ConfigurationError(
            f"API key {name} has no sha256", allowed="64 hexadecimal digits", do="create a key with graft keys create"
        )
    if not isinstance(models, list) or not all(isinstance(pattern, str) and pattern for pattern in models):
        raise ConfigurationError(f"API key {name} does not say which models it may use", allowed='a list such as ["*"]')
    group = entry.get("cache_group", name)
    if not isinstance(group, str) or not group:
        raise ConfigurationError(f"API key {name}: cache_group is not a name", got=repr(group))
    return ApiKey(
        name=name,
        digest=digest,
        caller=Caller(
            tenant=Tenant(name=name, cache_salt=group),
            models=tuple(models),
            is_admin=_flag(name, entry, "admin"),
            reads_metrics=_flag(name, entry, "metrics"),
        ),
        limits=RateLimits(**{field: _limit(name, entry, field) for field in _LIMITS}),
    )


def _flag(name: str, entry: Mapping[str, Any], field: str) -> bool:
    value = entry.get(field, False)
    if not isinstance(value, bool):
        raise ConfigurationError(f"API key {name}: {field} is not a flag", got=repr(value), allowed="true, false")
    return value


def _limit(name: str, entry: Mapping[str, Any], field: str) -> int | None:
    value = entry.get(field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"API key {name}: {field} is no limit", got=repr(value), allowed="integers from 1")
    return value
