"""ContentGuard: prevent message text from being encoded as tokens reserved for the template.

Called by `chat`. Characters of a message that would form such a token are replaced, one for one, by
private-use characters that occur nowhere else. After rendering, the template's own tokens are
located, and the text between them is restored and encoded by a tokenizer without those tokens. A
message that spells no token is encoded as usual. Messages and templates do not enter.
"""

from collections.abc import Callable, Collection, Iterator

from tokenizers import AddedToken, Encoding, Tokenizer

from ..model_files.tokenizer import text_encoding

# Two private-use planes: these characters have no meaning in text.
_STAND_INS = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


class StandInsExhausted(ValueError):
    """The texts use every private-use character."""


class Cover:
    """Stand-ins for one request: characters that do not occur in `taken`, all of its texts."""

    def __init__(self, taken: Callable[[], Collection[str]]) -> None:
        self._taken = taken
        self._free: Iterator[str] | None = None
        self._stand_ins: dict[str, str] = {}

    @property
    def used(self) -> bool:
        return bool(self._stand_ins)

    def fresh(self) -> str:
        if self._free is None:
            taken = self._taken()
            self._free = (chr(code) for code in _STAND_INS if chr(code) not in taken)
        try:
            return next(self._free)
        except StopIteration:
            raise StandInsExhausted("the text holds every private-use character") from None

    def over(self, text: str, spans: list[tuple[int, int]]) -> str:
        """Replace all but the whitespace in `spans` of `text`; the length stays."""
        chars = list(text)
        for start, end in spans:
            for at in range(start, end):
                if not text[at].isspace():
                    chars[at] = self._stand_in(text[at])
        return "".join(chars)

    def _stand_in(self, char: str) -> str:
        if char not in self._stand_ins:
            self._stand_ins[char] = self.fresh()
        return self._stand_ins[char]

    def lift(self, text: str) -> str:
        return text.translate({ord(cover): char for char, cover in self._stand_ins.items()})


class ContentGuard:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Whitespace tokens cannot forge a turn, so they stay uncovered.
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._literals = [t.content for t in self._added.values() if t.content.strip()]
        self._beginnings = {text[:end] for text in self._literals for end in range(1, len(text))}
        self._endings = {text[start:] for text in self._literals for start in range(1, len(text))}
        self._longest = max(map(len, self._literals), default=0)
        # Some tokens are matched after normalisation, which can turn other spellings into theirs.
        self._folds = tokenizer.normalizer is not None and any(
            token.normalized for token in self._added.values()
        )

    def plain_literals(self) -> set[str]:
        """Return the added tokens that are not special."""
        return {token.content for token in self._added.values() if not token.special}

    def cover(self, text: str, cover: Cover, allowed: Collection[str] = ()) -> str:
        """Cover every token spelled in `text` except `allowed` ones. Raises StandInsExhausted.

        A partial token at either end is covered too, since the template might add the other part.
        """
        while spans := self._spans(text, allowed):
            text = cover.over(text, spans)
        edges = self._edges(text)
        return cover.over(text, edges) if edges else text

    def encode(self, rendered: str, cover: Cover) -> list[int]:
        """Encode rendered text: uncovered tokens as tokens, all else as ordinary text."""
        texts, tokens, at = [], [], 0
        for token_id, start, end in self._spelt(rendered):
            texts.append(rendered[at:start])
            tokens.append(token_id)
            at = end
        texts.append(rendered[at:])
        # One placeholder per token, so that the text behind it is encoded as a continuation,
        # not as the beginning of a text.
        place = cover.fresh()
        text = place.join(cover.lift(part) for part in texts)
        plain = self._plain_tokenizer(place)
        encoding = text_encoding(plain, text)
        place_id = plain.token_to_id(place)
        own = iter(tokens)
        return [
            # place_id may also be an id of the model, if its vocabulary has gaps.
            next(own)
            if token_id == place_id and text[slice(*_span(encoding, index))] == place
            else token_id
            for index, token_id in enumerate(encoding.ids)
        ]

    def _spans(self, text: str, allowed: Collection[str]) -> list[tuple[int, int]]:
        spans = []
        for literal in self._literals:
            if literal in allowed:
                continue
            start = text.find(literal)
            while start >= 0:
                spans.append((start, start + len(literal)))
                start = text.find(literal, start + 1)
        return spans + self._folded_spans(text, allowed) if self._folds else spans

    def _folded_spans(self, text: str, allowed: Collection[str]) -> list[tuple[int, int]]:
        return [
            (start, end)
            for token_id, start, end in self._spelt(text)
            if self._added[token_id].content not in allowed and text[start:end].strip()
        ]

    def _spelt(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield id, start and end of the added tokens that `text` spells.

        Offsets are fetched one by one: all at once, those of a long text hold the interpreter's
        lock.
        """
        encoding = text_encoding(self._tokenizer, text)
        for index, token_id in enumerate(encoding.ids):
            if (token := self._added.get(token_id)) is not None:
                start, end = _span(encoding, index)
                if self._spells(text[start:end], token):
                    yield token_id, start, end

    def _spells(self, text: str, token: AddedToken) -> bool:
        """Return whether `text` spells the token; the unknown token stands for other text."""
        if text.strip() == token.content.strip():
            return True
        fold = self._tokenizer.normalizer
        if fold is None or not token.normalized:
            return False
        folded: bool = fold.normalize_str(text).strip() == fold.normalize_str(token.content).strip()
        return folded

    def _edges(self, text: str) -> list[tuple[int, int]]:
        size = len(text)
        if 0 < size < self._longest and any(text in literal for literal in self._literals):
            return [(0, size)]
        spans = []
        for length in range(min(self._longest - 1, size), 0, -1):
            if text[:length] in self._endings:
                spans.append((0, length))
            if text[size - length :] in self._beginnings:
                spans.append((size - length, size))
        return spans

    def _plain_tokenizer(self, place: str) -> Tokenizer:
        """Build a tokenizer with the same model and splitting; `place` is its only token."""
        plain = Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            plain.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        plain.add_special_tokens([AddedToken(place, special=True, normalized=False)])
        return plain


def _span(encoding: Encoding, index: int) -> tuple[int, int]:
    """Return the token's range in the text; (0, 0) for a token that no text produced."""
    return encoding.token_to_chars(index) or (0, 0)
