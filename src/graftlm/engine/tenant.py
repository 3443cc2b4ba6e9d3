"""On whose account a request runs. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """name: whose share of a fair schedule a request uses up.
    cache_salt: only requests with the same salt share blocks of the prefix cache. With one salt for all, how soon a
        prompt is answered tells whether somebody else has sent its beginning before.
    """

    name: str
    cache_salt: str = ""
