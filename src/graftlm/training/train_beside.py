"""Training jobs beside a server's requests, which serves each adapter as soon as it is finished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from graftlm.engine.async_llm import AsyncLLM
from graftlm.engine.background_thread import background_thread
from graftlm.errors import GraftError
from graftlm.training.background import BackgroundTrainer
from graftlm.training.job import TrainingJob
from graftlm.training.job_run import JobRun
from graftlm.training.output import CHECKPOINT_NAME, check_folder
from graftlm.training.training import check_distinct, prepare_job, start_run

logger = logging.getLogger(__name__)


def train_beside(llm: AsyncLLM, trainer: BackgroundTrainer, jobs: Sequence[TrainingJob]) -> None:
    """Let jobs run between the requests. A job whose folder has a checkpoint goes on from there.

    Raises:
        ConfigurationError, AdapterError, TrainingDataError: before anything is trained; AdapterNameTaken among them.
    """
    for job in jobs:
        llm.check_adapter_name(job.label)
    base = llm.whole_base
    resumed = {job: (Path(job.output).expanduser() / CHECKPOINT_NAME).is_file() for job in jobs}
    check_distinct(jobs)
    for job in jobs:
        check_folder(Path(job.output).expanduser(), resume=resumed[job])
    prepared = [prepare_job(job, base, llm.model_name) for job in jobs]
    loads = background_thread("graft-trained")

    def report(run: JobRun) -> None:
        if run.state == "failed":
            logger.error("%s: training failed: %s", run.job.label, run.failure)
        elif run.state == "finished":
            loads.submit(_serve, llm, run)

    for item in prepared:
        trainer.add(start_run(item, base, resume=resumed[item.job]), report)


def _serve(llm: AsyncLLM, run: JobRun) -> None:
    try:
        # Loading waits on nothing of any loop's but a thread of the engine's.
        adapter = asyncio.run(llm.load_adapter(run.job.label, run.folder, replace=True))
    except GraftError as error:
        logger.error("%s: trained, but not served: %s", run.job.label, error)
    else:
        logger.info("%s: trained, and served as version %s", adapter.name, adapter.digest[:12])
