"""Who sends a request, and what they may do. A server without API keys has one caller, who may do everything."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.tenant import Tenant

_LONGEST_NOTED = 256
NOT_ADMIN = "this API key may not manage adapters and workers; do: use one with admin = true"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """tenant: on whose account their requests run; None for each adapter's own.
    models: patterns such as `legal-*` for the names of the models they may use. Others do not exist for them.
    is_admin: may load and unload adapters, and drain workers if they may use all models.
    reads_metrics: may read /metrics, which names every model.
    """

    tenant: Tenant | None
    models: tuple[str, ...]
    is_admin: bool
    reads_metrics: bool

    def may_use(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.models)

    @property
    def name(self) -> str | None:
        """Whose what they make is; None without API keys."""
        return None if self.tenant is None else self.tenant.name

    def owns(self, owner: str | None) -> bool:
        """Whether what a tenant of this name has made is theirs to see. Without API keys everything is."""
        return self.tenant is None or self.name == owner


NOBODY = Caller(tenant=None, models=(), is_admin=False, reads_metrics=False)
ANYONE = Caller(tenant=None, models=("*",), is_admin=True, reads_metrics=True)


def caller_of(connection: HTTPConnection) -> Caller:
    """The caller of a request that has come through `Authentication`; nobody, if it was refused before that."""
    caller: Caller = getattr(connection.state, "caller", NOBODY)
    return caller


def resolve_model(connection: HTTPConnection, llm: AsyncLLM, model: str) -> str | None:
    """The adapter that a request's model name means for whoever sent it; None for the base. Every route that takes a
    model's name begins here.

    Raises:
        ModelNotFound: the name does not answer, or not to this caller: the two look the same.
        InvalidRequest: it looks like a weighted sum and is none.
    """
    # For the log, which is to stay smaller than what is sent.
    connection.state.model = model[:_LONGEST_NOTED]
    return llm.resolve_model(model, may_use=caller_of(connection).may_use)


def require_admin(connection: HTTPConnection) -> None:
    """A dependency of routes. Raises HTTPException: 403, the caller may not manage adapters and workers."""
    if not caller_of(connection).is_admin:
        raise HTTPException(403, NOT_ADMIN)


def require_metrics(connection: HTTPConnection) -> None:
    """A dependency of routes. Raises HTTPException: 403, the caller may not read metrics."""
    if not caller_of(connection).reads_metrics:
        raise HTTPException(403, "this API key may not read metrics; do: use one with metrics = true")


def require_operator(connection: HTTPConnection) -> None:
    """A dependency of routes that concern everybody. Raises HTTPException: 403, the caller is no admin, or one of some
    models only."""
    require_admin(connection)
    if "*" not in caller_of(connection).models:
        raise HTTPException(403, 'this API key is for some models only; do: use an admin\'s with models = ["*"]')
