"""Chat templates from a public package, fetched for tests and never committed.

`python tests/support/public_templates.py` puts them into build/chat-templates (`make test` does so
once). pip downloads the source archive of llama-cpp-python, from which only the templates are kept.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "build" / "chat-templates"
_PACKAGE = "llama-cpp-python"
_INSIDE = "/vendor/llama.cpp/models/templates/"


def public_templates() -> list[Path]:
    """Return the fetched templates; empty if they have not been fetched."""
    return sorted(DIRECTORY.glob("*.jinja"))


def fetch() -> int:
    """Download and unpack the templates; return their number."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--quiet",
        ]
        command += ["-c", str(ROOT / "constraints.txt"), "--no-deps", "--no-binary", _PACKAGE]
        subprocess.run([*command, "--dest", scratch, _PACKAGE], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as files:
            for member in files:
                if _INSIDE in member.name and member.name.endswith(".jinja"):
                    content = files.extractfile(member)
                    assert content is not None
                    (DIRECTORY / Path(member.name).name).write_bytes(content.read())
    return len(public_templates())


if __name__ == "__main__":
    found = fetch()
    print(f"{found} chat templates in {DIRECTORY}")
    sys.exit(0 if found else 1)
