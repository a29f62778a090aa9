"""Reader of the chat template in a model's files.

Called by the front and by `end_tokens`, which render it. Rendering and messages must not enter.
"""

from pathlib import Path
from typing import Any

from .errors import ModelError, names_the_file
from .gguf_file import metadata, open_gguf
from .tokenizer import tokenizer_config


@names_the_file
def read_chat_template(path: str) -> str | None:
    """Return the Jinja source, or None if the model has no template. Raises ModelError.

    In a directory chat_template.jinja takes precedence over tokenizer_config.json.
    """
    if path.endswith(".gguf"):
        return _text(metadata(open_gguf(path)).get("tokenizer.chat_template"))
    file = Path(path) / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    return _text(tokenizer_config(path).get("chat_template"))


def _text(value: Any) -> str | None:  # noqa: ANN401  # any JSON value
    """Accept one template, or a list of named ones, of which "default" is for chats."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        return _text(named.get("default"))
    raise ModelError(f"the chat template is a {type(value).__name__}; text is expected")
