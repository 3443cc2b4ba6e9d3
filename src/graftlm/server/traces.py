"""Where traces go, for servers that keep some. Knows the extra package only once it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def open_traces(endpoint: str) -> TracerProvider:
    """A provider whose spans go to an OTLP collector; its `shutdown` sends what is left.

    Raises:
        ConfigurationError: the endpoint is no URL, or OpenTelemetry is not installed.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            "the OTLP endpoint is no URL", got=repr(endpoint), allowed="such as http://127.0.0.1:4318"
        )
    try:
        from graftlm.server.tracing import export_to
    except ImportError as cause:
        raise ConfigurationError("traces need OpenTelemetry", got=cause, do="pip install 'graftlm[otel]'") from cause
    return export_to(endpoint)
