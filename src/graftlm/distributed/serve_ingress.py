"""Ray Serve's proxy in front of an application. Knows no HTTP: what answers is made by its caller's function, in a
process of Ray Serve's.

Whoever imports this has Ray Serve installed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation

from graftlm.config import EngineConfig
from graftlm.distributed.cores import cores_each
from graftlm.distributed.ray_cluster import RayCluster
from graftlm.errors import ConfigurationError

_NAME = "graft"
# The engine decides what waits: Ray Serve's own limit is 5 requests at once.
_MAX_ONGOING_REQUESTS = 1 << 20
# More than the application has to drain, for what is left to do then: its workers end.
_MARGIN_SECONDS = 15.0
# As Python prints one: its type at the margin, and what it says.
_EXCEPTION = re.compile(r"[\w.]+: \S")


class Ingress:
    """What Ray Serve makes in its process: nothing but the application."""


class ServeIngress:
    """An application behind Ray Serve's proxy on the cluster's head node, which answers when this is made.

    Ray Serve keeps the application's process up: it starts another when this one dies.

    Args:
        build: makes the ASGI application, in a process on the cluster that reserves no cores: workers do.
        config: of the engine in it, which says where Ray is and how many processes there will be.
        keep_alive_seconds: how long a connection may lie idle.
        drain_seconds: that running requests get to finish at the end.

    Raises:
        ConfigurationError: Ray cannot be reached or is too small, another application is behind Ray Serve there, or
            this one could not be made; the message has the end of what Ray Serve said.
    """

    def __init__(
        self,
        build: Callable[[], object],
        config: EngineConfig,
        *,
        host: str,
        port: int,
        keep_alive_seconds: int,
        drain_seconds: float,
    ) -> None:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._cluster = RayCluster(config.ray_address, num_processes=config.num_processes, cpus_each=cores_each(config))
        self._is_ours = False

        def make() -> object:
            # Ray Serve takes a plain function for one that makes an application, and all else for an application.
            return build()

        try:
            if serve.status().proxies:
                raise ConfigurationError(
                    "Ray Serve runs on this cluster already", do="end it (serve shutdown), or use another cluster"
                )
            self._is_ours = True
            serve.start(
                proxy_location=ProxyLocation.HeadOnly,
                http_options=HTTPOptions(host=host, port=port, keep_alive_timeout_s=keep_alive_seconds),
            )
            deployment = serve.deployment(
                name=_NAME,
                num_replicas=1,
                max_ongoing_requests=_MAX_ONGOING_REQUESTS,
                ray_actor_options={"num_cpus": 0},
                graceful_shutdown_timeout_s=drain_seconds + _MARGIN_SECONDS,
                max_constructor_retry_count=1,
            )(serve.ingress(make)(Ingress))
            serve.run(deployment.bind(), name=_NAME, route_prefix="/")
        except RuntimeError as cause:
            said = _last_words() or str(cause)
            self.close()
            raise ConfigurationError("Ray Serve could not start the application", got=said) from cause
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the application, Ray Serve, and Ray if it was started here. May be called twice."""
        if self._is_ours:
            self._is_ours = False
            serve.shutdown()
        self._cluster.close()


def _last_words() -> str:
    """The exception that kept the application from being made; empty if there was none."""
    application = serve.status().applications.get(_NAME)
    if application is None:
        return ""
    # Each message is a traceback, whose last line at the margin is the exception.
    lines = [line for deployment in application.deployments.values() for line in deployment.message.splitlines()]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), "")
