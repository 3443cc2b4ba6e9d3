"""`graft serve`: the OpenAI-compatible server."""

from __future__ import annotations

import gc
import ipaddress
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.byte_size import parse_byte_size
from graftlm.cli.config_file import read_config
from graftlm.cli.engine_options import ModelArgument, engine_options
from graftlm.errors import ConfigurationError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from graftlm import AsyncLLM
    from graftlm.server.tls import TLS


@engine_options
def serve(
    model: ModelArgument = "",
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            is_eager=True,
            callback=read_config,
            help="TOML file of these options, keyed by their names in snake_case; what is given here wins.",
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the bundled model and adapters.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    enable_adapter_loading: Annotated[
        bool,
        typer.Option("--enable-adapter-loading", help="Let clients load and unload adapters; needs --adapter-root."),
    ] = False,
    adapter_root: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="A folder clients may load adapters from. Repeat it for more."),
    ] = None,
    adapter_hub_id: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Ids on the hub that clients may load, such as my-org/*. Repeat it for more."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A web page's origin whose scripts may use the server; * is any. Repeat it for more.",
        ),
    ] = None,
    max_body_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="A larger request is refused unread. Such as 8MiB.")
    ] = "8MiB",
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM file of the certificate: serve HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="PEM file of its key, if that is another file.")] = None,
    ssl_keyfile_password: Annotated[
        str | None, typer.Option(envvar="GRAFT_SSL_KEYFILE_PASSWORD", help="What the key file is encrypted with.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time that running requests get to finish after the first Ctrl-C.")
    ] = 10,
    receive_timeout: Annotated[
        float,
        typer.Option(
            min=0.001, help="Most seconds that the head of a request may take to arrive, and each MiB of its body."
        ),
    ] = 60,
    request_timeout: Annotated[
        float | None,
        typer.Option(min=0.001, help="Most seconds that a generation may take; a request may ask for fewer."),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="API keys that may use the server, as graft keys create writes them."),
    ] = None,
    fine_tuning: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Let clients upload files and run fine-tuning jobs, as OpenAI's API has them; both are kept in DIR.",
        ),
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Train the job of a TOML file beside the requests, and serve the result. Repeat it for more.",
        ),
    ] = None,
    max_training_pause: Annotated[
        float, typer.Option(min=0.001, help="Most seconds that a request waits for a pass of training, about.")
    ] = 0.1,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="OpenTelemetry collector that gets a trace of every request, such as http://127.0.0.1:4318.",
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How the model writes calls of functions, if its template does not say."),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Write a line of JSON to stderr for every request.")
    ] = False,
    ingress: Annotated[
        str | None,
        typer.Option(
            metavar="ray-serve",
            help="Have Ray Serve take the requests, on the cluster of --workers or --replicas; default: this process.",
        ),
    ] = None,
    engine: dict[str, Any],
) -> None:
    """Serve a model and its adapters over HTTP, as OpenAI does.

    An adapter is asked for by its name as the model.
    """
    if bool(model) == demo:
        raise ConfigurationError("serve needs one model", do="give MODEL, or --demo for the bundled one")
    if demo:
        from graftlm.demo import MODEL_NAME, demo_adapters, demo_model, demo_quantization

        model = str(demo_model())
        engine["name"] = engine["name"] or MODEL_NAME
        engine |= demo_quantization(engine["quantization"])
        engine["adapters"] = {**demo_adapters(), **engine["adapters"]}

    from graftlm.server.adapters import permitted_sources
    from graftlm.server.cors import cors_options
    from graftlm.server.http_server import bind
    from graftlm.server.key_file import KeyFile
    from graftlm.server.traces import open_traces
    from graftlm.text.tool_calls import named_format

    # What is wrong with these is said now, not after the model has been loaded.
    permitted_sources(adapter_root or (), adapter_hub_id or (), enable_adapter_loading=enable_adapter_loading)
    cors_options(cors_origin or ())
    num_body_bytes = parse_byte_size(max_body_bytes)
    tls = _tls(ssl_certfile, ssl_keyfile, ssl_keyfile_password)
    keys = None if api_keys is None else KeyFile(api_keys)
    if tool_call_parser is not None:
        named_format(tool_call_parser)
    logging.basicConfig(format="%(message)s")
    if keys is None and not _is_loopback(host):
        logging.getLogger("graftlm.server").warning(
            "whoever reaches %s may use this server; do: give --api-keys unless something in front checks", host
        )
    app_options: dict[str, Any] = {
        "adapter_roots": tuple(root.resolve() for root in adapter_root or ()),
        "adapter_hub_ids": adapter_hub_id or (),
        "enable_adapter_loading": enable_adapter_loading,
        "receive_timeout": receive_timeout,
        "request_timeout": request_timeout,
        "cors_origins": cors_origin or (),
        "max_body_bytes": num_body_bytes,
        "tool_call_parser": tool_call_parser,
    }
    if ingress is not None:
        from graftlm.cli.serve_ingress import check_ingress, run_behind_ray_serve
        from graftlm.server.app_recipe import AppRecipe

        check_ingress(
            ingress,
            {
                "--ssl-certfile": tls, "--access-log": access_log, "--fine-tuning": fine_tuning, "--train": train,
            },
        )  # fmt: skip
        recipe = AppRecipe(
            model=model,
            engine=engine,
            app=app_options,
            api_keys=None if api_keys is None else api_keys.resolve(),
            otlp_endpoint=otlp_endpoint,
            drain_seconds=drain_seconds,
        )
        run_behind_ray_serve(recipe, host=host, port=port)
        return
    traces = None if otlp_endpoint is None else open_traces(otlp_endpoint)
    # What was quantised, and to how many bytes.
    logging.getLogger("graftlm.models").setLevel(logging.INFO)
    with bind(host, port) as listener:
        from graftlm import AsyncLLM
        from graftlm.server import create_app
        from graftlm.server.fine_tuning.training import Training

        llm = AsyncLLM(model, **engine)
        training = Training(llm, fine_tuning, train or (), max_pause_seconds=max_training_pause)
        app = create_app(
            llm,
            write_access=_write_line if access_log else None,
            keys=keys,
            fine_tuning=training.service,
            traces=traces,
            **app_options,
        )
        with _set_apart_from_garbage():
            _run(
                app,
                llm,
                listener,
                drain_seconds=drain_seconds,
                receive_timeout=receive_timeout,
                tls=tls,
                show_request=demo,
            )
        training.close()
        if traces is not None:
            traces.shutdown()


@contextmanager
def _set_apart_from_garbage() -> Iterator[None]:
    """What is there when the server begins to serve stays until its end. Visiting all of it, as Python's collector
    does now and then, would hold every request up for some 0.2 seconds. The process is the server's own; the engine,
    which may be in anybody's, leaves the collector alone."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run(
    app: FastAPI,
    llm: AsyncLLM,
    listener: socket.socket,
    *,
    drain_seconds: float,
    receive_timeout: float,
    tls: TLS | None,
    show_request: bool,
) -> None:
    from graftlm.server.http_server import HTTPServer, url_of

    def announce() -> None:
        url = url_of(listener, scheme="http" if tls is None else "https")
        typer.echo(f"{_names(llm)} at {url}/v1")
        if show_request:
            curl = _curl(url, next(iter(llm.adapters), llm.model_name))
            typer.echo(f"\nOpen {url}/ in a browser, or try it:\n\n{curl}\n")

    # Uvicorn raises the signal again once it is through, for whoever ran it: nobody, and the exit code is 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server = HTTPServer(
        app, llm, drain_seconds=drain_seconds, receive_timeout=receive_timeout, on_ready=announce, tls=tls
    )
    server.run(sockets=[listener])


def _tls(certfile: Path | None, keyfile: Path | None, password: str | None) -> TLS | None:
    from graftlm.server.tls import TLS

    if certfile is None:
        if keyfile is not None:
            raise ConfigurationError("--ssl-keyfile needs its certificate", do="give --ssl-certfile as well")
        return None
    return TLS(certfile=certfile, keyfile=keyfile, keyfile_password=password)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _names(llm: AsyncLLM) -> str:
    adapters: Sequence[str] = list(llm.adapters)
    if not adapters:
        return f"Serving {llm.model_name}"
    few = ", ".join(adapters[:8]) + (", …" if len(adapters) > 8 else "")
    return f"Serving {llm.model_name} with {len(adapters)} adapter{'s' if len(adapters) > 1 else ''} ({few})"


def _curl(url: str, model: str) -> str:
    from graftlm.demo import PROMPT

    body = json.dumps({"model": model, "messages": [{"role": "user", "content": PROMPT}]})
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"
