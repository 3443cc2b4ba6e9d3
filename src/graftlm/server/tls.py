"""The certificate that a server shows."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from graftlm.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class TLS:
    """certfile: PEM, the server's certificate first. keyfile: PEM; None when it is in `certfile` too.

    Raises:
        ConfigurationError: they cannot be read, or do not belong together.
    """

    certfile: Path
    keyfile: Path | None = None
    keyfile_password: str | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password of its own OpenSSL would ask the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, lambda: self.keyfile_password or "")
        except (OSError, ssl.SSLError) as cause:
            raise ConfigurationError(
                "the certificate cannot be used", got=f"{self.certfile}, {self.keyfile}: {cause}"
            ) from cause
