"""Jobs, their events and their checkpoints on disk: they outlive the server."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from graftlm.errors import ObjectNotFound
from graftlm.server.fine_tuning.job import FineTuningJob, JobCheckpoint, JobEvent
from graftlm.server.fine_tuning.ownership import Owns, anybody
from graftlm.training.atomic_file import write_atomically

_JOB, _EVENTS, _CHECKPOINTS, _OUTPUT = "job.json", "events.jsonl", "checkpoints.json", "adapter"


class JobStore:
    """A folder with a folder for each job. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = Lock()
        read = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"*/{_JOB}")]
        self._jobs = {job["id"]: FineTuningJob(**job) for job in read}

    def add(self, job: FineTuningJob) -> None:
        (self._folder / job.id).mkdir()
        with self._lock:
            self._put(job)

    def get(self, job_id: str, owns: Owns = anybody) -> FineTuningJob:
        """Raises: ObjectNotFound: there is none, or it is somebody else's."""
        if (job := self._jobs.get(job_id)) is None or not owns(job.owner):
            raise ObjectNotFound("no such fine-tuning job", got=repr(job_id)[:100])
        return job

    def newest_first(self, owns: Owns = anybody) -> list[FineTuningJob]:
        """Jobs of these owners, the newest first."""
        jobs = [job for job in self._jobs.values() if owns(job.owner)]
        return sorted(jobs, key=lambda job: (job.created_at, job.id), reverse=True)

    def change(self, job_id: str, **changes: Any) -> FineTuningJob:
        """Put values in the place of a job's; what it is then."""
        with self._lock:
            job = dataclasses.replace(self._jobs[job_id], **changes)
            self._put(job)
        return job

    def output(self, job_id: str) -> Path:
        """Where its adapter is written."""
        return self._folder / job_id / _OUTPUT

    def checkpoint_output(self, job_id: str, step: int) -> Path:
        """Where the adapter as it was after a step is written."""
        return self._folder / job_id / f"step-{step}"

    def add_checkpoint(self, checkpoint: JobCheckpoint) -> None:
        """Note one, in the place of one of the same step."""
        with self._lock:
            kept = [known for known in self._read_checkpoints(checkpoint.job_id) if known.step != checkpoint.step]
            text = json.dumps([dataclasses.asdict(item) for item in (*kept, checkpoint)], indent=2)
            path = self._folder / checkpoint.job_id / _CHECKPOINTS
            write_atomically(path, lambda path: path.write_text(text, encoding="utf-8"))

    def checkpoints(self, job_id: str) -> list[JobCheckpoint]:
        """The newest first.

        Raises:
            ObjectNotFound
        """
        with self._lock:
            found = self._read_checkpoints(self.get(job_id).id)
        return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)

    def tell(
        self,
        job_id: str,
        message: str,
        *,
        level: Literal["info", "warn", "error"] = "info",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Append an event."""
        event = JobEvent(
            id=f"ftevent-{secrets.token_hex(12)}", created_at=int(time.time()), level=level, message=message, data=data
        )
        with self._lock, (self._folder / job_id / _EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(event)) + "\n")

    def events(self, job_id: str) -> list[JobEvent]:
        """The newest first.

        Raises:
            ObjectNotFound
        """
        path = self._folder / self.get(job_id).id / _EVENTS
        with self._lock:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [JobEvent(**json.loads(line)) for line in reversed(lines)]

    def _read_checkpoints(self, job_id: str) -> list[JobCheckpoint]:
        path = self._folder / job_id / _CHECKPOINTS
        if not path.exists():
            return []
        return [JobCheckpoint(**item) for item in json.loads(path.read_text(encoding="utf-8"))]

    def _put(self, job: FineTuningJob) -> None:
        text = json.dumps(dataclasses.asdict(job), indent=2)
        write_atomically(self._folder / job.id / _JOB, lambda path: path.write_text(text, encoding="utf-8"))
        self._jobs[job.id] = job
