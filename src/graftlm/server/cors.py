"""Which web pages' scripts may use the server: none unless told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from graftlm.errors import ConfigurationError
from graftlm.server.authentication import RATE_LIMIT_HEADERS
from graftlm.server.request_ids import HEADER

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s*]+")


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Options of Starlette's CORSMiddleware. Keys are sent in a header, so no page gets to use what a browser knows.

    Raises:
        ConfigurationError: an origin is none.
    """
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None:
            raise ConfigurationError(
                "this is not the origin of a web page",
                got=repr(origin),
                allowed="scheme://host[:port] without a path, or *",
            )
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": [HEADER, "retry-after", *RATE_LIMIT_HEADERS],
    }
