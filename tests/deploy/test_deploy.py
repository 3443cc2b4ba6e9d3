"""The files under deploy/ speak of options, metrics, files and services that there are."""

from __future__ import annotations

import configparser
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from graftlm.cli import app
from graftlm.server.metrics import MODEL, metric_table

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIG = "/etc/graft/graft.toml"


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEPLOY / "grafana" / "graft.json").read_text())
    return content


def test_every_metric_of_the_dashboard_is_exported() -> None:
    published = {}
    for name, kind, labels, _ in metric_table():
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        published |= {f"{name}{suffix}": labels for suffix in suffixes}
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard()["templating"]["list"]]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"graft_[a-z0-9_]+", query)
        assert names
        for name in names:
            assert name in published, query
        if MODEL in query:
            assert any(MODEL in published[name] for name in names), query


def test_no_two_panels_of_the_dashboard_lie_on_each_other() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """By the path inside a container, what is mounted there. `${NAME:?why}` stands for one word."""
    entries = [re.sub(r"\$\{[^}]*\}", "MODELS", volume).split(":") for volume in service["volumes"]]
    return {entry[1]: entry[0] for entry in entries}


def test_the_composed_services_find_each_other_and_their_files() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        for source in mounts(service).values():
            # What is in etc/ its user makes.
            assert not source.startswith("./") or source.startswith("./etc") or (DEPLOY / source).is_file(), source
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
    assert (DEPLOY / services["graft"]["build"]["context"] / services["graft"]["build"]["dockerfile"]).is_file()
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["graft:8000"]
    assert job["authorization"]["credentials_file"] in mounts(services["prometheus"])
    [source] = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in dashboard()["panels"]} == {source["uid"]}
    [provider] = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    dashboards = provider["options"]["path"]
    assert any(path.startswith(f"{dashboards}/") for path in mounts(services["grafana"]))


def container_command() -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text()
    entrypoint, command = (re.search(rf"^{word} (\[.*\])$", text, re.MULTILINE) for word in ("ENTRYPOINT", "CMD"))
    assert entrypoint is not None
    assert command is not None
    return [*json.loads(entrypoint[1]), *json.loads(command[1])]


def unit_command() -> list[str]:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "graft.service")
    assert int(unit["Service"]["TimeoutStopSec"]) > 25
    return shlex.split(unit["Service"]["ExecStart"])


@pytest.mark.parametrize("command", [container_command, unit_command])
def test_the_commands_that_start_a_server_have_options_that_there_are(command: Any) -> None:
    program, *arguments = command()
    assert Path(program).name == "graft"
    assert CONFIG in arguments
    config = [str(DEPLOY / "graft.toml") if argument == CONFIG else argument for argument in arguments]
    result = CliRunner().invoke(app, [*config, "--port", "0"])
    # Every key and flag is known: what is missing is the file of keys.
    assert result.exit_code == 2
    assert "/etc/graft/keys.toml" in result.stderr


def test_the_ray_jobs_command_has_options_that_there_are_and_its_workers_the_cores_it_asks_for() -> None:
    job, service, policy = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "graft"
    # Every flag is known: what is missing is the volume.
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "/models/adapters" in result.stderr
    options = dict(itertools.pairwise(arguments))
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    assert workers["replicas"] == int(options["--workers"])
    [container] = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["cpu"] == options["--worker-cpus"]
    head = cluster["headGroupSpec"]["template"]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in (head, workers["template"]))
    [port] = head["spec"]["containers"][0]["ports"]
    assert str(port["containerPort"]) == options["--port"]
