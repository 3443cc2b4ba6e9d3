"""The `graft` command. Each command's file imports what is heavy only when the command runs."""

from graftlm.cli.main import app, main

__all__ = ["app", "main"]
