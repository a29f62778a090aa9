"""The vocabulary inside a GGUF file: its tokens, what kind each is, merges, scores, special roles.

Called by `gguf_tokenizer`, which builds a tokenizer of it, and by `end_tokens`. Key names and token
types are those of the GGUF specification. Everything here is checked, and what is wrong is named by
its key; the callers add the file's name.
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
    """`types` are as they are used: markers in `mistyped` were ordinary text in the file."""

    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]]
    mistyped: tuple[str, ...] = ()

    def control(self) -> dict[str, int]:
        """Token -> id of those that are no part of an answer's text."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == TokenType.CONTROL
        }


def read_vocabulary(meta: Metadata) -> Vocabulary:
    """Raises ModelError for what is missing, malformed or contradicts itself."""
    tokens, types = _tokens(meta), _token_types(meta)
    vocabulary = Vocabulary(tokens, types, _merges(meta, tokens, types))
    return _with_markers(vocabulary, _template_texts(meta))


def gguf_tokenizer_size(meta: Metadata) -> int:
    """Ids that can be spelled: rows of type UNUSED at the end only fill up the embedding."""
    size = len(_tokens(meta))
    types = _token_types(meta)
    while size and types[size - 1] == TokenType.UNUSED:
        size -= 1
    return size


def gguf_special_tokens(meta: Metadata) -> dict[str, str]:
    """Role -> token, for the roles of templates whose id in the file is one of its tokens."""
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
    """Give markers of the template that are typed as ordinary text the type that they need.

    Some converters write such files, and the markers would be spelled in letters. A token that no
    merge makes cannot be meant as text. One that ends answers by its name is control whatever its
    type, as in llama.cpp.
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
    """The template's source, and a rendering: some build their markers, `'<|' + role + '|>'`."""
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
