"""A tokenizer built from the vocabulary inside a GGUF file: byte-level BPE or SentencePiece BPE.

Called by `tokenizer`; `gguf_vocabulary` reads and checks the vocabulary. A table here maps
pre-tokenizer names to rules; an unknown name is refused, since a guess would change every prompt.
Behaviour follows llama.cpp.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, processors
from tokenizers import decoders as dec
from tokenizers import pre_tokenizers as pre

from .errors import ModelError
from .gguf_file import Metadata, flag, integer, text
from .gguf_vocabulary import gguf_special_tokens, read_vocabulary
from .sentencepiece_vocab import SPACE

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CL100K_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Pre:
    """Rules by which a byte-level vocabulary splits text into words before merging."""

    splits: tuple[str, ...]  # regular expressions, applied in turn to the pieces of the last
    ignore_merges: bool = False  # a word that is a token is not merged
    adds_bos: bool = False  # default if the file has no add_bos_token
    nfc: bool = False


_GPT2 = _Pre((_GPT2_WORDS,))
_SMOLLM = _Pre((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = _Pre(
    (_CL100K_HEAD + r"\p{N}{1,3}" + _CL100K_TAIL,),
    ignore_merges=True,
    adds_bos=True,
)
# The original tokenizer normalises to NFC; the GGUF file does not record it.
_QWEN2 = _Pre((_CL100K_HEAD + r"\p{N}" + _CL100K_TAIL,), nfc=True)
_DEFAULT = _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))

_PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "mpt": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _Pre(_LLAMA3.splits),
    "dbrx": _Pre(_LLAMA3.splits),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _Pre(_QWEN2.splits),
}


def gguf_tokenizer(meta: Metadata) -> Tokenizer:
    """Build the tokenizer. Raises ModelError for an unknown vocabulary type or pre-tokenizer."""
    kind = text(meta, "tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level_bpe(meta)
    if kind == "llama":
        return _sentencepiece_bpe(meta)
    raise ModelError(f"tokenizer.ggml.model {kind!r} is not supported; known: gpt2, llama")


def _byte_level_bpe(meta: Metadata) -> Tokenizer:
    name = text(meta, "tokenizer.ggml.pre") or "default"
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(f"tokenizer.ggml.pre {name!r} is not supported; known: {known}")
    rules = _PRE_TOKENIZERS[name]
    if "tokenizer.ggml.merges" not in meta:
        raise ModelError("the GGUF file has a gpt2 vocabulary but no tokenizer.ggml.merges")
    vocabulary = read_vocabulary(meta)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_ids(vocabulary.tokens),
            merges=vocabulary.merges,
            ignore_merges=rules.ignore_merges,
        )
    )
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre.Split(Regex(regex), behavior="isolated") for regex in rules.splits]
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre.Sequence([*splits, byte_level])
    tokenizer.decoder = dec.ByteLevel()
    _add_tokens(tokenizer, zip(vocabulary.tokens, vocabulary.types, strict=True))
    _add_bos(tokenizer, meta, rules.adds_bos)
    return tokenizer


def _sentencepiece_bpe(meta: Metadata) -> Tokenizer:
    if meta.get("tokenizer.ggml.precompiled_charsmap"):
        raise ModelError("a SentencePiece vocabulary with a normalisation map is not supported")
    vocabulary = read_vocabulary(meta)
    # User-defined tokens are matched in raw text, which has plain spaces.
    tokens = [
        token.replace(SPACE, " ") if kind == TokenType.USER_DEFINED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_ids(tokens),
            merges=vocabulary.merges,
            unk_token=_unknown(meta, tokens),
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in vocabulary.types,
        )
    )
    # Each run of plain text gets a leading space, also after a special token.
    prefixed = flag(meta, "tokenizer.ggml.add_space_prefix", True)
    front = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*front, normalizers.Replace(" ", SPACE)])
    back = [dec.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = dec.Sequence(
        [dec.Replace(SPACE, " "), dec.ByteFallback(), dec.Fuse(), *back]
    )
    _add_tokens(tokenizer, zip(tokens, vocabulary.types, strict=True))
    _add_bos(tokenizer, meta, True)
    return tokenizer


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _unknown(meta: Metadata, tokens: list[str]) -> str:
    key = "tokenizer.ggml.unknown_token_id"
    unknown = integer(meta, key) or 0
    if not 0 <= unknown < len(tokens):
        raise ModelError(f"{key} is {unknown}, but the file has {len(tokens)} tokens")
    return tokens[unknown]


def _add_tokens(tokenizer: Tokenizer, typed_tokens: Iterable[tuple[str, int]]) -> None:
    """Add control tokens as special (not shown in an answer) and user-defined tokens as text."""
    control = (TokenType.CONTROL, TokenType.UNKNOWN)
    special, plain = [], []
    for token, kind in typed_tokens:
        if kind in control:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_bos(tokenizer: Tokenizer, meta: Metadata, by_default: bool) -> None:
    if not flag(meta, "tokenizer.ggml.add_bos_token", by_default):
        return
    bos = gguf_special_tokens(meta).get("bos_token")
    if bos is None:
        if "tokenizer.ggml.add_bos_token" in meta:
            raise ModelError("the GGUF file asks for a BOS token but has no valid bos_token_id")
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
