"""`graft doctor`: what Graft finds on this machine, and what is in its way."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

NEEDED = ("graftlm", "torch", "transformers", "safetensors", "huggingface-hub", "fastapi", "uvicorn")
OPTIONAL = {"peft": "check", "ray": "ray", "openai": "demo", "opentelemetry-sdk": "otel"}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LEAST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """problem: what is wrong and what to do; None when all is well."""

    name: str
    value: str
    problem: str | None = None


def doctor() -> None:
    """Say what Graft finds on this machine: versions, processor, kernels, memory, caches.

    The exit code is 1 if something is in the way of serving a model.
    """
    findings = [*_versions(), *_processor(), *_memory(), _cache()]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        typer.echo(f"{finding.name:{width}}  {finding.value}")
    problems = [finding for finding in findings if finding.problem is not None]
    for finding in problems:
        typer.echo(f"graft: {finding.name}: {finding.problem}", err=True)
    if problems:
        raise typer.Exit(1)


def _versions() -> Iterator[Finding]:
    yield Finding(name="python", value=f"{platform.python_version()} on {platform.platform(terse=True)}")
    for package in NEEDED:
        found = _version(package)
        problem = None if found else f"not installed; do: pip install {package}"
        yield Finding(name=package, value=found or "missing", problem=problem)
    for package, extra in OPTIONAL.items():
        value = _version(package) or f"not installed; pip install 'graftlm[{extra}]' adds it"
        yield Finding(name=package, value=value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> Iterator[Finding]:
    import psutil
    import torch

    from graftlm.kernels.backends import backends

    cores = psutil.cpu_count(logical=False)
    yield Finding(name="processor", value=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}")
    yield Finding(name="cores", value=f"{cores or 'unknown'}, {os.cpu_count()} hardware threads")
    chosen = os.environ.get("OMP_NUM_THREADS")
    by = "" if chosen is None else f", by OMP_NUM_THREADS={chosen}"
    yield Finding(name="threads", value=f"{torch.get_num_threads()}{by}")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding(name="gpus", value=", ".join(names) or "none that torch can use")
    for backend in backends(torch.device("cuda" if names else "cpu")):
        state = "in use" if backend.reason is None else f"not used: {backend.reason}"
        yield Finding(name="kernels", value=f"{backend.name}, {state}")


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    problem = None
    if memory.available < LEAST_BYTES:
        problem = "less than 1 GiB is free; do: stop what else runs here"
    yield Finding(
        name="memory", value=f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free", problem=problem
    )
    try:
        pages = HUGE_PAGES.read_text().strip()
    except OSError:
        pages = "not offered by this system"
    yield Finding(name="huge pages", value=pages)


def _cache() -> Finding:
    from graftlm.models.quantized_cache import default_cache_folder

    try:
        folder = default_cache_folder()
        place = next(path for path in (folder, *folder.parents) if path.exists())
    except (OSError, RuntimeError) as cause:
        return Finding(name="cache", value="none", problem=f"{cause}; do: set GRAFT_CACHE to a folder")
    free = f"{folder}, {shutil.disk_usage(place).free / 2**30:.1f} GiB free"
    if not place.is_dir() or not os.access(place, os.W_OK):
        # Serving goes on without it, so this is told and no problem of the exit code's when it is merely read-only.
        problem = None if place.is_dir() else "this is not a folder; do: set GRAFT_CACHE to one"
        return Finding(name="cache", value=f"{free}, cannot be written to", problem=problem)
    return Finding(name="cache", value=free)
