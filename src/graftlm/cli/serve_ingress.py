"""`graft serve --ingress ray-serve`: the application in a process of Ray Serve's, until somebody ends this one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import typer

from graftlm.config import EngineConfig
from graftlm.errors import ConfigurationError
from graftlm.server.app_recipe import AppRecipe

RAY_SERVE = "ray-serve"


def check_ingress(ingress: str, options: Mapping[str, object]) -> None:
    """Raise ConfigurationError: there is no such ingress, or one of these options, which it cannot serve, is given."""
    if ingress != RAY_SERVE:
        raise ConfigurationError("there is no such --ingress", got=ingress, allowed=RAY_SERVE)
    if given := [name for name, value in options.items() if value]:
        raise ConfigurationError(
            "these options need this process to take the requests", got=", ".join(given), do="leave out --ingress"
        )


def run_behind_ray_serve(recipe: AppRecipe, *, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends this process at once.

    Raises:
        ConfigurationError: the port is taken, there are neither workers nor replicas, Ray Serve is not installed or
            does not start.
    """
    from graftlm.distributed.cores import cores_each
    from graftlm.distributed.start import serve_behind_ray_serve
    from graftlm.server.http_server import KEEP_ALIVE_SECONDS, bind, url_of

    config = EngineConfig(model=recipe.model, **recipe.engine)
    if config.replicas is None and not config.has_workers:
        raise ConfigurationError("an ingress needs a model on Ray", do="give --workers or --replicas")
    # Ray gives a process that reserves no cores one thread: the share of them is worked out here.
    recipe = replace(recipe, engine={**recipe.engine, "worker_cpus": cores_each(config)})
    # A port in use is known at once, and 0 becomes a free one.
    with bind(host, port) as listener:
        url, port = url_of(listener), listener.getsockname()[1]
    ingress = serve_behind_ray_serve(
        recipe.build,
        config,
        host=host,
        port=port,
        keep_alive_seconds=KEEP_ALIVE_SECONDS,
        drain_seconds=recipe.drain_seconds,
    )
    asked_to_end = threading.Event()

    def end(number: int, frame: Any) -> None:
        if asked_to_end.is_set():
            os._exit(128 + number)
        asked_to_end.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    typer.echo(f"Serving {recipe.model} behind Ray Serve at {url}/v1")
    asked_to_end.wait()
    ingress.close()
