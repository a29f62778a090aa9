"""Decides which tokens end an answer, from a model's files.

Called once by the scheduler, at start. Files may declare the end of a text but not of a turn, or
neither. So three sources count: ids declared as an end, control tokens whose name always means an
end, and the token that the chat template writes after an answer. Requests must not enter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chat_template import read_chat_template
from .errors import ModelError, names_the_file
from .gguf_file import integer, metadata, open_gguf
from .gguf_vocabulary import read_vocabulary
from .json_file import read_json_object
from .special_names import ENDS_BY_NAME, ENDS_SEVERAL_MESSAGES
from .template_engine import ChatTemplate, TemplateRefusal
from .tokenizer import read_added_tokens, read_special_tokens, token_id

_GGUF_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_PLACE = "Zqanswerqz"  # stands for the answer when the template is rendered


@dataclass(frozen=True, slots=True)
class EndToken:
    id: int
    text: str  # empty if the files do not give it
    why: tuple[str, ...]  # the sources that declare it

    def __str__(self) -> str:
        return f"{self.text} ({self.id}: {', '.join(self.why)})"


@dataclass(frozen=True, slots=True)
class EndTokens:
    tokens: tuple[EndToken, ...]  # ascending ids
    mistyped: tuple[str, ...] = ()  # markers that the GGUF file gives the type of ordinary text

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class _Said:
    """Facts about end tokens in the files of either format."""

    ends: list[tuple[int, str]]  # (id declared as an end, where)
    control: dict[str, int]  # token -> id of tokens that are not shown in an answer
    texts: dict[int, str]  # id -> token
    mistyped: tuple[str, ...] = ()


@names_the_file
def read_end_tokens(path: str) -> EndTokens:
    """Find the end tokens of a directory or .gguf file. Raises ModelError."""
    said = _in_gguf(path) if path.endswith(".gguf") else _in_directory(path)
    ends = [*said.ends, *((said.control[name], "name") for name in _named_ends(said.control))]
    turn_end = _turn_end(path, said.control)
    if turn_end is not None:
        ends.append((said.control[turn_end], "chat template"))
    why: dict[int, list[str]] = {}
    for end, source in ends:
        why.setdefault(end, []).append(source)
    tokens = (EndToken(end, said.texts.get(end, ""), tuple(why[end])) for end in sorted(why))
    return EndTokens(tuple(tokens), said.mistyped)


def _named_ends(control: dict[str, int]) -> list[str]:
    several = ENDS_SEVERAL_MESSAGES in control
    return [
        name for name in control if name in ENDS_BY_NAME and not (several and name == "<|end|>")
    ]


def _turn_end(path: str, control: dict[str, int]) -> str | None:
    """Return the control token that the chat template writes directly after an answer, if any."""
    source = read_chat_template(path)
    if source is None:
        return None
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _PLACE}]
    try:
        template = ChatTemplate(source, read_special_tokens(path))
        text = template.render(messages, add_generation_prompt=False)
    except TemplateRefusal:
        return None
    _, place, rest = text.rpartition(_PLACE)
    behind = [name for name in control if place and name and rest.lstrip().startswith(name)]
    return max(behind, key=len, default=None)


def _in_gguf(path: str) -> _Said:
    meta = metadata(open_gguf(path))
    vocabulary = read_vocabulary(meta)
    count = len(vocabulary.tokens)
    ends = []
    for key in _GGUF_KEYS:
        end = integer(meta, f"tokenizer.ggml.{key}")
        if end is not None:
            if not 0 <= end < count:
                raise ModelError(f"tokenizer.ggml.{key} is {end}, but there are {count} tokens")
            ends.append((end, key))
    texts = dict(enumerate(vocabulary.tokens))
    return _Said(ends, vocabulary.control(), texts, vocabulary.mistyped)


def _in_directory(path: str) -> _Said:
    ends: list[tuple[int, str]] = []
    for name in ("config.json", "generation_config.json"):
        listed = read_json_object(Path(path) / name).get("eos_token_id")
        ends += [(end, name) for end in _id_list(listed, name)]
    eos = read_special_tokens(path).get("eos_token")
    end = token_id(path, eos) if eos is not None else None
    if end is not None:
        ends.append((end, "tokenizer_config.json"))
    added = read_added_tokens(path)
    control = {token.content: token.id for token in added if token.special}
    # Some files type a token with an end name as text; the name decides.
    control |= {token.content: token.id for token in added if token.content in ENDS_BY_NAME}
    return _Said(ends, control, {token.id: token.content for token in added})


def _id_list(value: Any, where: str) -> list[int]:  # noqa: ANN401  (any JSON value)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if type(item) is not int or item < 0:
            raise ModelError(f"{where}: eos_token_id must be ids, got {value!r}")
    return values
