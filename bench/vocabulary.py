"""Vocabulary: prompts that are equal as ids and as text, made of whole common words.

For servers that take no ids, and for chats whose answers become part of the next prompt. Called by
`serve` and `peers` if a tokenizer is available.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from ..model_files.tokenizer import load_tokenizer

_WORD = re.compile(r"[Ġ▁][a-z]{2,}")  # a space, as byte-level and SentencePiece files write it


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    words: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Encode without BOS, as part of a longer prompt."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def load_vocabulary(path: str) -> Vocabulary:
    """Load from a model directory or .gguf file. Raises ModelError."""
    tokenizer = load_tokenizer(path)
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    words = sorted(token_id for token, token_id in vocab.items() if _WORD.fullmatch(token))
    return Vocabulary(tokenizer, tuple(words))
