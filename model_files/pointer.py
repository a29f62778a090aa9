"""Detects Git LFS pointers: small texts that a clone without LFS has instead of large files."""

from pathlib import Path

from .errors import ModelError

_BEGINNING = b"version https://git-lfs"


def refuse_pointer(file: Path) -> None:
    """Raise ModelError if `file` is a pointer. Unreadable files are not an error here."""
    try:
        with file.open("rb") as opened:
            beginning = opened.read(len(_BEGINNING))
    except OSError:
        return
    if beginning == _BEGINNING:
        raise ModelError(
            f"{file} is a Git LFS pointer and not the file itself: run `git lfs pull` beside it"
        )
