"""The OpenAI-compatible HTTP server. Knows HTTP and JSON; everything about tokens is the engine's."""

from graftlm.server.app import create_app

__all__ = ["create_app"]
