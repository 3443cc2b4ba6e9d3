"""`graft cluster`: a Ray cluster of these machines, and the processes behind a server that runs on it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.api_client import LOCAL, ApiKeyOption, JsonOption, UrlOption, fetch
from graftlm.cli.byte_size import parse_byte_size
from graftlm.errors import ConfigurationError, RemoteError

if TYPE_CHECKING:
    from graftlm.distributed.ray_node import RayNode

cluster = typer.Typer(
    help="Make a cluster of machines, and look after the workers of a server on it.", no_args_is_help=True
)

CpusOption = Annotated[int | None, typer.Option(min=1, help="Cores that this machine offers; default: all.")]
StoreOption = Annotated[
    str,
    typer.Option(
        "--object-store-memory", metavar="SIZE", help="Shared memory for what is too large to travel with an answer."
    ),
]
_CONNECT_SECONDS = 5.0
# Ray's names of nodes have 56 letters.
_SHOWN_OF_NODE = 12


@cluster.command()
def start(
    *,
    host: Annotated[
        str, typer.Option(help="This machine's address, by which others join. By default none can.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that others join at.")] = 6379,
    num_cpus: CpusOption = None,
    object_store_memory: StoreOption = "256MiB",
) -> None:
    """Begin a cluster with this machine, until Ctrl-C."""
    from graftlm.distributed import ray_node

    num_bytes = parse_byte_size(object_store_memory)
    _check_free(host, port)
    authentication = ray_node.authentication()
    if authentication:
        ray_node.make_token()
    is_open = host not in ray_node.LOOPBACK
    if is_open:
        typer.echo(
            "graft: whoever can join a Ray cluster, or send it work, can run any code on all of its machines, and some "
            "of its ports are open at all of this one's addresses; do: keep it in a private network, among people who "
            "trust each other",
            err=True,
        )
        if not authentication and os.environ["RAY_AUTH_MODE"] != "token":
            typer.echo("graft: and RAY_AUTH_MODE says that they are not asked for a token", err=True)
    _end_on_sigterm()
    node = ray_node.start_head(host, port, num_cpus=num_cpus, object_store_bytes=num_bytes)
    with _held(node):
        address = f"{host}:{port}"
        typer.echo(f"The cluster is up at {address}. Ctrl-C ends it.\n")
        if is_open:
            typer.echo(f"Another machine joins with\n\n  graft cluster join {address}\n")
            token = ray_node.token_file()
            if authentication and token is not None:
                typer.echo(f"once it has this one's {token}.\n")
        mode = "".join(f"{name}={value} " for name, value in authentication.items())
        typer.echo(f"To serve on it:\n\n  {mode}graft serve MODEL --workers 2 --ray-address {address}\n")


@cluster.command()
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT that graft cluster start has printed.")],
    *,
    host: Annotated[
        str | None, typer.Option(help="This machine's address, by which the others know it; default: as Ray finds it.")
    ] = None,
    num_cpus: CpusOption = None,
    object_store_memory: StoreOption = "256MiB",
) -> None:
    """Make this machine one more of a cluster, until Ctrl-C.

    Layers that are here when it leaves are lost, and recovered elsewhere; graft cluster drain moves them first.
    """
    from graftlm.distributed import ray_node

    num_bytes = parse_byte_size(object_store_memory)
    _check_joinable(address)
    token = ray_node.token_file()
    if ray_node.authentication() and token is not None and not token.exists():
        raise ConfigurationError(
            "the cluster asks for a token, and there is none here", got=token, do="copy it from the first machine"
        )
    _end_on_sigterm()
    node = ray_node.start_member(address, host=host, num_cpus=num_cpus, object_store_bytes=num_bytes)
    with _held(node):
        typer.echo(f"This machine is part of the cluster at {address}. Ctrl-C takes it out.\n")


@cluster.command()
def drain(
    worker: Annotated[
        str,
        typer.Argument(
            metavar="WORKER", help="The id of a worker, a replica or a node, as graft cluster status shows them."
        ),
    ],
    *,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a worker's layers, or a replica, to another process, or all of a node's to other nodes, while requests run.

    What had them ends; a replica has half a minute for the requests it has begun. Nothing is placed on a node that was
    drained until the server is started anew.
    """
    drained = fetch(url, api_key, "POST", "/v1/drain_worker", {"worker": worker})
    if as_json:
        typer.echo(json.dumps(drained))
        return
    for stage in drained["moved"]:
        start, stop = stage["layers"]
        place = f"process {stage['pid']} on node {stage['node'][:_SHOWN_OF_NODE]}"
        if stage["worker"] == stage["to"]:
            typer.echo(f"{stage['worker']}: is now {place}")
        else:
            typer.echo(f"layers {start}-{stop - 1}: from {stage['worker']} to {stage['to']}, {place}")
    if not drained["moved"]:
        typer.echo("nothing had to move any more")


@cluster.command()
def status(*, url: UrlOption = LOCAL, api_key: ApiKeyOption = None, as_json: JsonOption = False) -> None:
    """Show each worker's place, layers, adapters and load."""
    engine = fetch(url, api_key, "GET", "/status")["engine"]
    if engine is None:
        raise RemoteError("this key may not see what the server is doing", do="use one that may read metrics")
    if as_json:
        typer.echo(json.dumps(engine))
        return
    if not engine["workers"]:
        typer.echo("no workers: the model is in the server's own process")
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    names = ("worker", "node", "process", "state", "layers", "rank", "adapters", "steps", "ms a step", "ms idle")
    table = Table(*names, "sent", "running", "waiting", "cache", box=None, pad_edge=False)
    for worker in engine["workers"]:
        table.add_row(*_place(worker), *_work(worker["work"], decimal), *_load(worker["load"]))
    console = Console()
    console.print(table)
    console.print(
        f"{engine['num_running']} answers running, {engine['num_waiting']} waiting, "
        f"{engine['kv_cache_usage']:.0%} of the KV cache held, {engine['num_moves']} moves of layers and "
        f"{engine['num_lost_workers']} workers lost so far"
    )


def _place(worker: Mapping[str, Any]) -> tuple[str, ...]:
    layers = worker["layers"]
    return (
        worker["id"],
        worker["node"][:_SHOWN_OF_NODE],
        str(worker["pid"]),
        worker["state"],
        "" if layers is None else f"{layers[0]}-{layers[1] - 1}",
        "" if worker["rank"] is None else str(worker["rank"]),
        ", ".join(worker["adapters"]),
    )


def _work(work: Mapping[str, Any] | None, size: Any) -> tuple[str, ...]:
    if work is None:
        return ("",) * 4
    steps = work["num_steps"]
    compute, idle = (f"{1000 * work[key] / steps:.1f}" if steps else "" for key in ("compute_seconds", "idle_seconds"))
    return str(steps), compute, idle, size(work["hop_bytes"])


def _load(load: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Of a replica."""
    if load is None:
        return ("",) * 3
    return str(load["num_running"]), str(load["num_waiting"]), f"{load['kv_cache_usage']:.0%}"


def _check_free(host: str, port: int) -> None:
    """Raises ConfigurationError: it is no address of this machine, or taken."""
    if host in ("0.0.0.0", "::"):
        raise ConfigurationError(
            "others do not find this machine by such an address", got=host, do="give the one they know it by"
        )
    try:
        socket.create_server((host, port)).close()
    except OSError as cause:
        raise ConfigurationError("nothing can listen there", got=f"{host}:{port}: {cause}") from cause


def _check_joinable(address: str) -> None:
    """Raises ConfigurationError: it is no address, only this machine's, or nothing is there."""
    from graftlm.distributed.ray_node import LOOPBACK

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError("this is not the address of a cluster", got=address, allowed="HOST:PORT")
    if host in LOOPBACK:
        raise ConfigurationError(
            "a cluster there is of one machine", got=address, do="start it with --host, the address others know"
        )
    try:
        with closing(socket.create_connection((host, int(port)), _CONNECT_SECONDS)):
            pass
    except OSError as cause:
        raise ConfigurationError("no cluster answers there", got=f"{address}: {cause}") from cause


def _end_on_sigterm() -> None:
    """As Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def _held(node: RayNode) -> Iterator[None]:
    """After what is done within: until Ctrl-C, or until the node ends by itself, which is an error."""
    try:
        yield
        node.wait()
    except KeyboardInterrupt:
        typer.echo("leaving")
    finally:
        node.close()
