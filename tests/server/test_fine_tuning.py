"""Fine-tuning jobs over HTTP, with OpenAI's own client, in the process that serves."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from graftlm import AsyncLLM
from graftlm.errors import AdapterNameTaken
from graftlm.server.api_keys import digest_of
from graftlm.server.fine_tuning.training import Training
from graftlm.server.key_file import KeyFile
from graftlm.training import train
from tests.server.live_server import DEADLINE_SECONDS, LiveServer, error_of, serving
from tests.tiny import make_adapter, make_llama

CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (("hi", "hello"), ("bye", "ciao"), ("2+2", "4"), ("capital of France", "Paris"))
]
OPTIONS = {"rank": 4, "target_modules": ["q_proj", "v_proj"], "schedule": "constant", "shuffle": False}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tuned") / "base")


@contextmanager
def tuning(base: Path, folder: Path, *files: str, **app_options: Any) -> Iterator[LiveServer]:
    llm = AsyncLLM(base, name="org/tiny", kv_cache_bytes=4 << 20)
    training = Training(llm, folder, files, max_pause_seconds=10)
    try:
        with serving(llm, fine_tuning=training.service, **app_options) as server:
            yield server
    finally:
        training.close()


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tuning(base, tmp_path_factory.mktemp("jobs")) as live:
        yield live


def upload(server: LiveServer, rows: list[dict[str, Any]] = CHATS, name: str = "chats.jsonl") -> str:
    return server.openai.files.create(file=(name, lines(rows)), purpose="fine-tune").id


def until(holds: Callable[[], bool]) -> None:
    """Ask until it holds."""
    asking = threading.Event()
    for _ in range(DEADLINE_SECONDS * 20):
        if holds():
            return
        asking.wait(0.05)
    raise AssertionError("it does not come to hold")


def ended(server: LiveServer, job_id: str) -> Any:
    """The job, once it has ended."""
    until(lambda: server.openai.fine_tuning.jobs.retrieve(job_id).finished_at is not None)
    return server.openai.fine_tuning.jobs.retrieve(job_id)


def messages(server: LiveServer, job_id: str) -> list[str]:
    return [event.message for event in server.openai.fine_tuning.jobs.list_events(job_id, limit=100).data]


def models(server: LiveServer) -> set[str]:
    return {model.id for model in server.openai.models.list()}


def test_files_are_kept_listed_given_back_and_deleted(server: LiveServer) -> None:
    content = lines(CHATS)
    first = server.openai.files.create(file=("a.jsonl", content), purpose="fine-tune")
    second = server.openai.files.create(file=("b.jsonl", content), purpose="fine-tune")
    assert (first.object, first.bytes, first.filename, first.purpose) == ("file", len(content), "a.jsonl", "fine-tune")
    assert {first.id, second.id} <= {file.id for file in server.openai.files.list(limit=1)}
    assert server.openai.files.retrieve(second.id) == second
    assert server.openai.files.content(first.id).read() == content
    assert server.openai.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        server.openai.files.retrieve(first.id)
    assert first.id not in {file.id for file in server.openai.files.list(purpose="fine-tune")}


def test_a_job_makes_the_adapter_that_graft_train_makes_and_serves_it(
    server: LiveServer, base: Path, tmp_path: Path
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_bytes(lines(CHATS))
    job = server.openai.fine_tuning.jobs.create(
        model="org/tiny",
        training_file=upload(server),
        validation_file=upload(server),
        suffix="greeter",
        seed=3,
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 4, "batch_size": 2, "learning_rate_multiplier": 50}},
        },
        metadata={"team": "a"},
        extra_body={"training": OPTIONS},
    )
    assert (job.object, job.status, job.seed, job.metadata) == ("fine_tuning.job", "validating_files", 3, {"team": "a"})
    done = ended(server, job.id)
    assert (done.status, done.error) == ("succeeded", None)
    assert done.fine_tuned_model == f"ft-tiny-greeter-{job.id[-8:]}"
    assert done.trained_tokens > 0

    train(base, data=data, output=tmp_path / "out", epochs=4, batch_size=2, lr=1e-2, seed=3, **OPTIONS)
    expected = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    events = list(server.openai.fine_tuning.jobs.list_events(job.id, limit=3))
    metrics = [event.data for event in reversed(events) if event.type == "metrics"]
    assert [line["train_loss"] for line in metrics] == pytest.approx(expected, abs=1e-5)
    assert metrics[-1]["valid_loss"] < metrics[0]["train_loss"]
    assert events[0].message == "The job has successfully completed"
    assert job.id in {listed.id for listed in server.openai.fine_tuning.jobs.list(limit=1)}

    prompt = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}
    tuned = server.openai.completions.create(model=done.fine_tuned_model, **prompt).choices[0].text
    assert tuned != server.openai.completions.create(model="org/tiny", **prompt).choices[0].text

    further = server.openai.fine_tuning.jobs.create(
        model=done.fine_tuned_model, training_file=upload(server), hyperparameters={"n_epochs": 1}
    )
    assert ended(server, further.id).status == "succeeded"
    begun = list(server.openai.fine_tuning.jobs.list_events(further.id))[-3]
    assert begun.message == "Fine-tuning job started"


def test_the_last_epochs_end_with_checkpoints_that_are_served_and_trained_further(server: LiveServer) -> None:
    jobs = server.openai.fine_tuning.jobs
    asked: dict[str, Any] = {
        "training_file": upload(server),
        "validation_file": upload(server),
        "hyperparameters": {"n_epochs": 5, "batch_size": 2, "learning_rate_multiplier": 50},
        "extra_body": {"training": {**OPTIONS, "eval_every": 2}},
    }
    job = ended(server, jobs.create(model="org/tiny", **asked).id)
    found = list(jobs.checkpoints.list(job.id, limit=2))
    assert [checkpoint.step_number for checkpoint in found] == [10, 8, 6]
    assert [checkpoint.fine_tuned_model_checkpoint for checkpoint in found] == [
        job.fine_tuned_model, f"{job.fine_tuned_model}-ckpt-step-8", f"{job.fine_tuned_model}-ckpt-step-6"
    ]  # fmt: skip
    assert {(checkpoint.object, checkpoint.fine_tuning_job_id) for checkpoint in found} == {
        ("fine_tuning.job.checkpoint", job.id)
    }
    updates = {event.data["step"]: event.data for event in jobs.list_events(job.id, limit=100) if event.data}
    for checkpoint in found:
        data = updates[checkpoint.step_number]
        assert (checkpoint.metrics.step, checkpoint.metrics.train_loss) == (data["step"], data["train_loss"])
        assert checkpoint.metrics.full_valid_loss == data["valid_loss"]
    names = [checkpoint.fine_tuned_model_checkpoint for checkpoint in found]
    assert set(names) <= models(server)
    asked_prompt: dict[str, Any] = {"prompt": "the cat", "max_tokens": 1, "temperature": 0, "logprobs": 1}
    replies = [server.openai.completions.create(model=name, **asked_prompt) for name in names]
    assert len({reply.choices[0].logprobs.token_logprobs[0] for reply in replies}) == 3

    further = ended(
        server, jobs.create(model=names[-1], **{**asked, "extra_body": {"training": {"shuffle": False}}}).id
    )
    first = min(
        (event.data for event in jobs.list_events(further.id, limit=100) if event.data), key=lambda d: d["step"]
    )
    assert first["train_loss"] == pytest.approx(updates[7]["train_loss"], abs=1e-5)


def test_a_preference_job_learns_from_openais_rows(server: LiveServer) -> None:
    rows = [
        {
            "input": {"messages": chat["messages"][:1]},
            "preferred_output": chat["messages"][1:],
            "non_preferred_output": [{"role": "assistant", "content": "no"}],
        }
        for chat in CHATS
    ]
    job = server.openai.fine_tuning.jobs.create(
        model="org/tiny",
        training_file=upload(server, rows),
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 2}}},
    )
    assert job.method.dpo.hyperparameters.beta == 0.2
    assert ended(server, job.id).status == "succeeded"
    events = server.openai.fine_tuning.jobs.list_events(job.id)
    first = min((event.data for event in events if event.data), key=lambda data: data["step"])
    assert first["train_loss"] == pytest.approx(0.6931472, abs=1e-5)


def test_wrong_rows_fail_the_job_and_say_where(server: LiveServer) -> None:
    job = server.openai.fine_tuning.jobs.create(model="org/tiny", training_file=upload(server, [{"text": ""}]))
    failed = ended(server, job.id)
    assert (failed.status, failed.error.code) == ("failed", "invalid_training_file")
    assert "chats.jsonl:1: text is not a text" in failed.error.message
    # Not where the server keeps it.
    assert "/" not in failed.error.message.replace("org/tiny", "")
    assert server.text(model="org/tiny", prompt="still here")


def test_what_cannot_be_met_is_refused_by_name(server: LiveServer) -> None:
    file = upload(server)
    for body, param in (
        ({"model": "org/tiny", "training_file": "file-none"}, "training_file"),
        ({"model": "org/tiny", "training_file": file, "training": {"rank": 0}}, "training"),
        ({"model": "org/tiny", "training_file": file, "training": {"output": "/etc"}}, "training"),
        ({"model": "org/tiny", "training_file": file, "integrations": [{"type": "wandb"}]}, "integrations"),
        ({"model": "org/tiny", "training_file": file, "method": {"type": "reinforcement"}}, "method"),
        ({"model": "org/tiny", "training_file": file, "epochs": 2}, "epochs"),
    ):
        assert error_of(server.http.post("/v1/fine_tuning/jobs", json=body))["param"] == param
    other = {"model": "gpt-4o", "training_file": file}
    assert error_of(server.http.post("/v1/fine_tuning/jobs", json=other), 404)["param"] == "model"
    assert error_of(server.http.get("/v1/fine_tuning/jobs/ftjob-none"), 404)["code"] == "not_found"
    assert error_of(server.http.get("/v1/fine_tuning/jobs", params={"after": "x"}))["param"] == "after"
    form = {"purpose": "assistants"}
    assert error_of(server.http.post("/v1/files", data=form, files={"file": b"x"}))["param"] == "purpose"
    assert error_of(server.http.post("/v1/files", data={"purpose": "fine-tune"}))["param"] == "file"


def test_without_the_folder_every_route_is_refused(base: Path) -> None:
    with serving(AsyncLLM(base, name="tiny", kv_cache_bytes=1 << 20)) as server:
        for path in ("/v1/files", "/v1/fine_tuning/jobs"):
            assert "serve with --fine-tuning" in error_of(server.http.get(path), 403)["message"]


def test_a_key_that_may_not_manage_adapters_may_not_train_them(base: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    entries = {"admin": ("*", "true"), "user": ("*", "false"), "team": ("org/*", "true")}
    keys.write_text("".join(
        f'[keys.{name}]\nsha256 = "{digest_of(f"secret-of-{name}")}"\nmodels = ["{models}"]\nadmin = {is_admin}\n'
        for name, (models, is_admin) in entries.items()
    ))  # fmt: skip

    def bearer(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer secret-of-{name}"}

    with tuning(base, tmp_path / "jobs", keys=KeyFile(keys)) as server:
        for name, status in (("admin", 200), ("user", 403)):
            assert server.http.get("/v1/files", headers=bearer(name)).status_code == status
        file = server.http.post(
            "/v1/files", files={"file": lines(CHATS)}, data={"purpose": "fine-tune"}, headers=bearer("team")
        ).json()["id"]
        body = {"model": "org/tiny", "training_file": file}
        reply = server.http.post("/v1/fine_tuning/jobs", json=body, headers=bearer("team"))
        assert "may not use ft-tiny-graft" in error_of(reply, 403)["message"]


def test_files_and_jobs_of_another_key_look_as_if_they_were_not_there(base: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(
        f'[keys.{name}]\nsha256 = "{digest_of(name)}"\nmodels = ["*"]\nadmin = true\n' for name in ("alice", "eve")
    ))  # fmt: skip
    with tuning(base, tmp_path / "jobs", keys=KeyFile(keys)) as server:

        def ask(key: str, method: str, path: str, **content: Any) -> httpx.Response:
            return server.http.request(method, f"/v1/{path}", headers={"Authorization": f"Bearer {key}"}, **content)

        form: dict[str, Any] = {"files": {"file": lines(CHATS)}, "data": {"purpose": "fine-tune"}}
        file = ask("alice", "POST", "files", **form).json()["id"]
        body = {"model": "org/tiny", "training_file": file, "hyperparameters": {"n_epochs": 100_000}}
        assert error_of(ask("eve", "POST", "fine_tuning/jobs", json=body))["param"] == "training_file"
        job = ask("alice", "POST", "fine_tuning/jobs", json=body).json()["id"]
        for path in (f"files/{file}", f"files/{file}/content", f"fine_tuning/jobs/{job}"):
            assert ask("alice", "GET", path).status_code == 200
        for method, path in (
            *(("GET", path) for path in (f"files/{file}", f"files/{file}/content", f"fine_tuning/jobs/{job}")),
            *(("GET", f"fine_tuning/jobs/{job}/{part}") for part in ("events", "checkpoints")),
            *(("POST", f"fine_tuning/jobs/{job}/{verb}") for verb in ("pause", "resume", "cancel")),
            ("DELETE", f"files/{file}"),
        ):
            assert error_of(ask("eve", method, path), 404)["code"] == "not_found"
        for path in ("files", "fine_tuning/jobs"):
            listed = [[entry["id"] for entry in ask(key, "GET", path).json()["data"]] for key in ("alice", "eve")]
            assert listed == [[file if path == "files" else job], []]
        assert ask("alice", "POST", f"fine_tuning/jobs/{job}/cancel").status_code == 200


def test_requests_are_answered_while_a_job_runs_and_it_can_be_paused_and_cancelled(server: LiveServer) -> None:
    job = server.openai.fine_tuning.jobs.create(
        model="org/tiny", training_file=upload(server), hyperparameters={"n_epochs": 100_000}
    )
    until(lambda: server.openai.fine_tuning.jobs.retrieve(job.id).status == "running")
    alone = server.text(model="org/tiny", prompt="the cat sat")
    assert server.openai.fine_tuning.jobs.pause(job.id).status == "paused"
    assert server.text(model="org/tiny", prompt="the cat sat") == alone
    assert error_of(server.http.post(f"/v1/fine_tuning/jobs/{job.id}/pause"))["message"]
    assert server.openai.fine_tuning.jobs.resume(job.id).status == "running"
    assert server.openai.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has ended: cancelled"):
        server.openai.fine_tuning.jobs.cancel(job.id)


def test_jobs_outlive_the_server(base: Path, tmp_path: Path) -> None:
    """What has ended is served again, and what was running goes on from its checkpoint."""
    with tuning(base, tmp_path) as server:
        file = upload(server)
        short = server.openai.fine_tuning.jobs.create(
            model="org/tiny", training_file=file, hyperparameters={"n_epochs": 1}
        )
        name = ended(server, short.id).fine_tuned_model
        several = server.openai.fine_tuning.jobs.create(
            model="org/tiny", training_file=file, hyperparameters={"n_epochs": 2}
        )
        checkpoint = f"{ended(server, several.id).fine_tuned_model}-ckpt-step-1"
        long = server.openai.fine_tuning.jobs.create(
            model="org/tiny", training_file=file, hyperparameters={"n_epochs": 100_000}
        )
        until(lambda: any("training loss" in message for message in messages(server, long.id)))
    with tuning(base, tmp_path) as server:
        until(lambda: {name, checkpoint} <= models(server))
        until(lambda: any("goes on from step" in message for message in messages(server, long.id)))
        assert server.openai.fine_tuning.jobs.cancel(long.id).status == "cancelled"


def test_a_job_file_whose_name_something_answers_to_is_refused(base: Path, tmp_path: Path) -> None:
    data, file = tmp_path / "chats.jsonl", tmp_path / "job.toml"
    data.write_bytes(lines(CHATS))
    adapter = make_adapter(base, tmp_path / "adapter")
    llm = AsyncLLM(base, name="tiny", adapters={"greeter": adapter}, kv_cache_bytes=4 << 20)
    for name in ("tiny", "greeter"):
        file.write_text(f'data = "{data}"\noutput = "{tmp_path / "out"}"\nname = "{name}"\n')
        with pytest.raises(AdapterNameTaken, match=f"already has this name; got: {name}"):
            Training(llm, None, [str(file)], max_pause_seconds=10)
    asyncio.run(llm.shutdown())
    assert not (tmp_path / "out").exists()


def test_a_job_file_is_trained_beside_the_requests_and_served(base: Path, tmp_path: Path) -> None:
    data, file = tmp_path / "chats.jsonl", tmp_path / "greeter.toml"
    data.write_bytes(lines(CHATS))
    file.write_text(f'data = "{data}"\noutput = "{tmp_path / "greeter"}"\nsteps = 3\nrank = 4\nlr = 0.02\n')
    with tuning(base, tmp_path / "jobs", str(file)) as server:
        until(lambda: "greeter" in models(server))
        assert server.text(model="greeter", prompt="hi") != server.text(model="org/tiny", prompt="hi")
    assert (tmp_path / "greeter" / "adapter_config.json").exists()
