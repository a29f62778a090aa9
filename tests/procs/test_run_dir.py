"""The run directory: private, held while its launcher lives, reclaimed after, nobody else's."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.run_dir import PREFIX, NoRunDirectory, run_directory
from tokenloom.wire.channel import AddressTooLong


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's own directories are long; the limit itself has a test below."""
    monkeypatch.setattr("tokenloom.wire.channel.IPC_PATH_LIMIT", 200)


def test_is_private_and_goes_with_its_files(base: Path) -> None:
    with run_directory() as run_dir:
        assert stat.S_IMODE(os.stat(run_dir).st_mode) == 0o700
        Path(run_dir, "front.sock").touch()
    assert not list(base.iterdir())


def test_goes_after_an_exception_too(base: Path) -> None:
    with pytest.raises(KeyError), run_directory():
        raise KeyError
    assert not list(base.iterdir())


def test_living_ones_are_kept_and_stale_ones_reclaimed(base: Path) -> None:
    stale = base / f"{PREFIX}stale"
    stale.mkdir()
    (stale / "front.sock").touch()
    with run_directory() as first, run_directory() as second:
        assert not stale.exists()
        assert first != second
        assert {str(path) for path in base.iterdir()} == {first, second}


def test_what_is_not_ours_is_left_alone(base: Path) -> None:
    (base / "elsewhere").mkdir()
    (base / "elsewhere" / "file").touch()
    (base / f"{PREFIX}link").symlink_to(base / "elsewhere")
    (base / f"{PREFIX}file").touch()
    (base / "tokenloom-0").mkdir()
    before = sorted(base.rglob("*"))
    with run_directory():
        pass
    assert sorted(base.rglob("*")) == before


def test_directory_of_another_user_is_left_alone(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / f"{PREFIX}theirs").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with run_directory():
        assert (base / f"{PREFIX}theirs").exists()


def test_one_that_is_reclaimed_before_it_was_locked_is_made_anew(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def make_and_lose_the_first(**options: str) -> str:
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    with run_directory() as run_dir:
        assert run_dir == made[1]


def test_too_long_a_path_is_refused_with_the_limit(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.wire.channel.IPC_PATH_LIMIT", 20)
    with pytest.raises(AddressTooLong, match=r"allows 20\. Set TMPDIR"), run_directory():
        pytest.fail("the directory must not be used")
    assert not list(base.iterdir())


@pytest.mark.parametrize("who", ["mkdtemp", "gettempdir"])
def test_full_disk_is_said_clearly(base: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", f"{base}/x")

    monkeypatch.setattr(tempfile, who, full)
    with pytest.raises(NoRunDirectory) as refused, run_directory():
        raise AssertionError("there is no directory")
    assert str(refused.value) == (
        f"cannot make a directory for the server's sockets in {base}: No space left on device. "
        "Set TMPDIR to a directory with room that you may write to."
    )
