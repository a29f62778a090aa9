"""Recognises a Git LFS pointer: a small text that a clone leaves in place of a large file."""

from pathlib import Path

from .errors import ModelError

_BEGINNING = b"version https://git-lfs"


def refuse_pointer(file: Path) -> None:
    """Raises ModelError with what to do if `file` is a pointer; other faults are the reader's."""
    try:
        with file.open("rb") as opened:
            beginning = opened.read(len(_BEGINNING))
    except OSError:
        return
    if beginning == _BEGINNING:
        raise ModelError(
            f"{file} is a Git LFS pointer and not the file itself: run `git lfs pull` beside it"
        )
