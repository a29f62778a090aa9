"""The vocabulary inside a GGUF file: tokens, their types, merges, scores and special roles.

Called by `gguf_tokenizer`, `tokenizer` and `end_tokens`. Key names and token types are those of the
GGUF specification. Everything is checked, and errors name the key; the callers add the file's name.
Building a tokenizer must not enter.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gguf import TokenType

from .errors import ModelError
from .gguf_file import Metadata, integer, numbers, text, texts
from .sentencepiece_vocab import derive_merges
from .special_names import ENDS_BY_NAME
from .template_engine import ChatTemplate, TemplateRefusal

_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_MERGES, _SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_MARKER = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]")
_CONTROL_SHAPE = re.compile(r"<[|\uff5c].*[|\uff5c]>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Checked contents of a vocabulary. `types` are corrected for the tokens in `mistyped`."""

    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    mistyped: tuple[str, ...] = ()

    def control(self) -> dict[str, int]:
        """Return token -> id of the control tokens, which are not shown in an answer."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == TokenType.CONTROL
        }


def read_vocabulary(meta: Metadata) -> Vocabulary:
    """Read and check a vocabulary. Raises ModelError for missing or inconsistent keys."""
    tokens, types = _tokens(meta), _token_types(meta)
    vocabulary = Vocabulary(tokens, types, _merges(meta, tokens, types))
    return _with_markers(vocabulary, _template_texts(meta))


def gguf_tokenizer_size(meta: Metadata) -> int:
    """Count the ids, without trailing UNUSED tokens, which only pad the embedding."""
    size = len(_tokens(meta))
    types = _token_types(meta)
    while size and types[size - 1] == TokenType.UNUSED:
        size -= 1
    return size


def gguf_special_tokens(meta: Metadata) -> dict[str, str]:
    """Return role -> token for the roles with a valid token id. Raises ModelError."""
    tokens = _tokens(meta)
    ids = {role: integer(meta, f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    return {role: tokens[i] for role, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def _tokens(meta: Metadata) -> list[str]:
    tokens = texts(meta, _TOKENS)
    if not tokens:
        raise ModelError(f"{_TOKENS} is missing or empty")
    return tokens


def _token_types(meta: Metadata) -> list[int]:
    count = len(_tokens(meta))
    if _TYPES not in meta:
        return [int(TokenType.NORMAL)] * count
    types = [int(kind) for kind in numbers(meta, _TYPES)]
    if len(types) != count:
        raise ModelError(f"{_TYPES} has {len(types)} entries for {count} tokens")
    return types


def _merges(meta: Metadata, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    if _MERGES in meta:
        return _listed_merges(meta, set(tokens))
    if text(meta, "tokenizer.ggml.model") != "llama":
        return []
    scores = [float(score) for score in numbers(meta, _SCORES)]
    if len(scores) != len(tokens):
        raise ModelError(f"{_SCORES} has {len(scores)} entries for {len(tokens)} tokens")
    pieces = [i for i, kind in enumerate(types) if kind == TokenType.NORMAL]
    return derive_merges(tokens, scores, pieces)


def _listed_merges(meta: Metadata, known: set[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for index, line in enumerate(texts(meta, _MERGES)):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise ModelError(f"{_MERGES}[{index}] is {line[:80]!r}, which is no pair")
        for piece in (left, right, left + right):
            if piece not in known:
                where = f"{_MERGES}[{index}] is {line[:80]!r}"
                raise ModelError(f"{where}, but {piece[:80]!r} is no token of the file")
        pairs.append((left, right))
    return pairs


def _with_markers(vocabulary: Vocabulary, template_texts: list[str]) -> Vocabulary:
    """Correct the types of template markers that the file types as ordinary text.

    Some converters write such files, and the markers would be split into letters. A NORMAL token
    that a merge produces is text and keeps its type. Other markers that end answers by name become
    control, as in llama.cpp; those in the template become control or user-defined by their shape.
    """
    made = {left + right for left, right in vocabulary.merges}
    types, mistyped = list(vocabulary.types), []
    for token_id, token in enumerate(vocabulary.tokens):
        if types[token_id] not in (TokenType.NORMAL, TokenType.USER_DEFINED):
            continue
        if not _MARKER.fullmatch(token):
            continue
        ends = token in ENDS_BY_NAME
        lost = types[token_id] == TokenType.NORMAL and token not in made
        if ends and (lost or types[token_id] == TokenType.USER_DEFINED):
            types[token_id] = int(TokenType.CONTROL)
        elif lost and any(token in source for source in template_texts):
            control = _CONTROL_SHAPE.fullmatch(token)
            types[token_id] = int(TokenType.CONTROL if control else TokenType.USER_DEFINED)
        else:
            continue
        mistyped.append(token)
    return Vocabulary(vocabulary.tokens, types, vocabulary.merges, tuple(mistyped))


def _template_texts(meta: Metadata) -> list[str]:
    """Return the template's source and renderings; some build markers as `'<|' + role + '|>'`."""
    source = meta.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return []
    return [source, *_renderings(ChatTemplate(source, gguf_special_tokens(meta)))]


def _renderings(template: ChatTemplate) -> Iterator[str]:
    for roles in (("system", "user", "assistant"), ("user", "assistant"), ("user", "tool")):
        try:
            yield template.render([{"role": role, "content": "text"} for role in roles])
        except TemplateRefusal:
            continue
