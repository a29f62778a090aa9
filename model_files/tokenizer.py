"""Loader of a model's tokenizer and of the names of its special tokens.

Called by the front (text to ids), the detokenizer (ids to text) and the scheduler (number of ids).
Reads tokenizer.json in a directory; `gguf_tokenizer` builds that of a .gguf file. Chat templates
and requests must not enter.
"""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Encoding, Tokenizer

from .errors import ModelError, names_the_file
from .gguf_file import metadata, open_gguf
from .gguf_tokenizer import gguf_tokenizer
from .gguf_vocabulary import gguf_special_tokens, gguf_tokenizer_size
from .json_file import read_json_object
from .pointer import refuse_pointer


class AddedTokenFields(msgspec.Struct):
    """An added token in tokenizer.json or tokenizer_config.json."""

    id: int
    content: str
    special: bool = False
    single_word: bool | None = None
    lstrip: bool | None = None
    rstrip: bool | None = None
    normalized: bool | None = None

    def flags(self) -> dict[str, bool]:
        """Return the flags that the file sets, as arguments of the library's AddedToken."""
        names = ("single_word", "lstrip", "rstrip", "normalized")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None} | {
            "special": self.special
        }


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedTokenFields] = []


# Roles of special tokens; each that the model has becomes a variable of its chat template.
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@names_the_file
def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a directory or .gguf file. Raises ModelError.

    `encode` adds BOS if the model asks for it.
    """
    if path.endswith(".gguf"):
        return gguf_tokenizer(metadata(open_gguf(path)))
    try:
        tokenizer = Tokenizer.from_file(str(_tokenizer_json(Path(path))))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"tokenizer.json of {path} cannot be read: {error}") from error
    # Some files keep the truncation and padding of their training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_declared_tokens(tokenizer, tokenizer_config(path))
    return tokenizer


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode `text` without special tokens, releasing the GIL while encoding.

    The library releases it for batches only.
    """
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def text_encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encode as `text_ids` does, with each token's offsets in `text`, which is slower."""
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


@names_the_file
def tokenizer_size(path: str) -> int:
    """Return the tokenizer's highest id plus one, without building the tokenizer.

    Embedding rows beyond it are padding that must not be sampled. Raises ModelError.
    """
    if path.endswith(".gguf"):
        return gguf_tokenizer_size(metadata(open_gguf(path)))
    file = _tokenizer_file(_tokenizer_json(Path(path)))
    vocab = file.model.vocab
    ids = [len(vocab) - 1] if isinstance(vocab, list) else list(vocab.values())
    return max([*ids, *(token.id for token in _added(file, path))], default=-1) + 1


def read_added_tokens(path: str) -> list[AddedTokenFields]:
    """Return the added tokens that a directory's tokenizer files declare. Raises ModelError."""
    file = Path(path) / "tokenizer.json"
    return _added(_tokenizer_file(file) if file.is_file() else _TokenizerFile(_Model({})), path)


def token_id(path: str, text: str) -> int | None:
    """Return the id of a token in a directory's files, or None. Raises ModelError."""
    for token in reversed(read_added_tokens(path)):
        if token.content == text:
            return token.id
    file = Path(path) / "tokenizer.json"
    vocab = _tokenizer_file(file).model.vocab if file.is_file() else {}
    if isinstance(vocab, dict):
        return vocab.get(text)
    # A Unigram vocabulary is a list of [piece, score] in id order.
    return next((i for i, entry in enumerate(vocab) if entry[0] == text), None)


@names_the_file
def read_special_tokens(path: str) -> dict[str, str]:
    """Return role -> token for the SPECIAL_ROLES that the files define. Raises ModelError.

    tokenizer_config.json takes precedence over special_tokens_map.json.
    """
    if path.endswith(".gguf"):
        return gguf_special_tokens(metadata(open_gguf(path)))
    found: dict[str, str] = {}
    for config in (
        read_json_object(Path(path) / "special_tokens_map.json"),
        tokenizer_config(path),
    ):
        for role in SPECIAL_ROLES:
            value = config.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[role] = text
    return found


def tokenizer_config(path: str) -> dict[str, Any]:
    """Read tokenizer_config.json of a directory; {} if absent. Raises ModelError."""
    return read_json_object(Path(path) / "tokenizer_config.json")


def _tokenizer_json(directory: Path) -> Path:
    file = directory / "tokenizer.json"
    if file.is_file():
        refuse_pointer(file)
        return file
    if (directory / "tokenizer.model").is_file():
        raise ModelError(
            f"{directory} has a tokenizer.model but no tokenizer.json, which is needed; "
            "save it with transformers' AutoTokenizer(...).save_pretrained, or serve a .gguf"
        )
    raise ModelError(f"{directory} has no tokenizer.json")


def _tokenizer_file(file: Path) -> _TokenizerFile:
    refuse_pointer(file)
    try:
        return msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _added(file: _TokenizerFile, path: str) -> list[AddedTokenFields]:
    """Return the added tokens of tokenizer.json, then those of tokenizer_config.json."""
    return [*file.added_tokens, *_declared(tokenizer_config(path)).values()]


def _declared(config: dict[str, Any]) -> dict[int, AddedTokenFields]:
    """Return added tokens of tokenizer_config.json by id. Raises ModelError."""
    where = "tokenizer_config.json: added_tokens_decoder"
    try:
        listed = msgspec.convert(
            config.get("added_tokens_decoder") or {}, dict[str, dict[str, Any]]
        )
        return {
            int(key): msgspec.convert({**fields, "id": int(key)}, AddedTokenFields)
            for key, fields in listed.items()
        }
    except (msgspec.ValidationError, ValueError) as error:
        raise ModelError(f"{where}: {error}") from error


def _add_declared_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Add tokens that only tokenizer_config.json declares. Raises ModelError if an id differs."""
    known = tokenizer.get_added_tokens_decoder()
    for token_id, fields in sorted(_declared(config).items()):
        if token_id in known:
            continue
        token = AddedToken(fields.content, **fields.flags())
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
        if tokenizer.token_to_id(fields.content) != token_id:
            raise ModelError(
                f"tokenizer_config.json gives {fields.content!r} the id {token_id}, "
                f"but with tokenizer.json it gets {tokenizer.token_to_id(fields.content)}"
            )
