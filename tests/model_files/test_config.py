"""read_config over the files of a directory, the metadata of GGUF files, and broken files."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from tokenloom.model_files.config import read_config
from tokenloom.model_files.errors import ModelError
from tokenloom.model_files.gguf_file import metadata, open_gguf


def write(directory: Path, **files: Any) -> str:  # noqa: ANN401  (any JSON value)
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return str(directory)


def test_config_is_the_json_object(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, config={"a": [1]})) == {"a": [1]}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_broken_config(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(str(tmp_path))


def gguf_file(path: Path) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "é", "", "日本"])
    writer.add_token_scores([0.5, -1.0, 0.0, 2.5])
    writer.add_token_types([1, 2, 3, 4])
    writer.add_array("flags", [True, False])
    writer.add_bool("yes", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return writer


def test_fast_arrays_equal_the_package_own_reading(tmp_path: Path) -> None:
    gguf_file(tmp_path / "a.gguf")
    original = gguf.GGUFReader(tmp_path / "a.gguf")
    found = metadata(open_gguf(tmp_path / "a.gguf"))
    assert found == {name: field.contents() for name, field in original.fields.items()}
    assert found["tokenizer.ggml.tokens"] == ["a", "é", "", "日本"]
    assert found["flags"] == [True, False]


def test_every_truncation_is_a_clear_error(tmp_path: Path) -> None:
    gguf_file(tmp_path / "a.gguf")
    whole = (tmp_path / "a.gguf").read_bytes()
    end = whole.index(b"yes") + 3
    for length in range(end):
        (tmp_path / "b.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelError, match="not a readable GGUF file"):
            open_gguf(tmp_path / "b.gguf")


def test_an_array_longer_than_the_file(tmp_path: Path) -> None:
    gguf_file(tmp_path / "a.gguf")
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    struct.pack_into("<Q", data, at, 1 << 60)
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        open_gguf(tmp_path / "a.gguf")


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; import tokenloom.model_files.config, tokenloom.model_files.resolve; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
