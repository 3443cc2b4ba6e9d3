"""From what the user typed to a `Checkpoint`."""

from __future__ import annotations

from pathlib import Path

from graftlm.checkpoint.checkpoint import Checkpoint
from graftlm.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graftlm.checkpoint.hub import download, is_hub_id
from graftlm.checkpoint.safetensors_folder import SafetensorsCheckpoint
from graftlm.errors import CheckpointError

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a model folder, a `.gguf` file, or a hub id. A path that exists is always local; no network is touched then.

    Raises:
        CheckpointError: nothing readable is there.
    """
    try:
        return _open(Path(source).expanduser(), source)
    except (OSError, RuntimeError) as cause:
        # A name that is too long, a user that does not exist, a folder that may not be read.
        raise CheckpointError("the model cannot be opened", got=repr(str(source))[:200], do=str(cause)[:200]) from cause


def is_local_model(source: str | Path) -> bool:
    """Whether a path is a model's rather than an adapter's: a `.gguf` file, or a folder with a model's config."""
    path = Path(source).expanduser()
    return path.suffix == ".gguf" or ((path / "config.json").is_file() and not (path / "adapter_config.json").is_file())


def _open(path: Path, source: str | Path) -> Checkpoint:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                "this file is not a model", got=path, allowed="a folder with config.json, a .gguf file or a hub id"
            )
        return GGUFCheckpoint(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if is_hub_id(source):
        return SafetensorsCheckpoint(download(str(source), MODEL_FILES, CheckpointError))
    raise CheckpointError(
        "no such model", got=repr(str(source))[:200], allowed="a folder with config.json, a .gguf file or a hub id"
    )
