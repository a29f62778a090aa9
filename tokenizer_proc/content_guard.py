"""Keeps what clients write from spelling a token that only the template may spell.

Called by `chat`. The characters of a message that would form such a token are covered, one for one,
by private-use characters that occur nowhere else, the template is rendered, its own tokens are
found, and the text between them is uncovered and encoded by a tokenizer that knows no other tokens.
So a message keeps its meaning as text, and one that spells no token is encoded as if we were not
here. Messages and templates do not enter.
"""

from collections.abc import Callable, Collection, Iterator

from tokenizers import AddedToken, Encoding, Tokenizer

from ..model_files.tokenizer import text_encoding

# Two planes of private use: no text has a meaning for them.
_STAND_INS = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


class StandInsExhausted(ValueError):
    """A text holds every private-use character."""


class Cover:
    """One request's stand-ins: characters that `taken` (all texts of the request) does not hold."""

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
        """`text`, as long as before, with all but the whitespace in `spans` covered."""
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
        # Tokens that are nothing but whitespace shape text and no conversation.
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._literals = [t.content for t in self._added.values() if t.content.strip()]
        self._beginnings = {text[:end] for text in self._literals for end in range(1, len(text))}
        self._endings = {text[start:] for text in self._literals for start in range(1, len(text))}
        self._longest = max(map(len, self._literals), default=0)
        # Tokens matched in normalised text: another spelling may turn into theirs.
        self._folds = tokenizer.normalizer is not None and any(
            token.normalized for token in self._added.values()
        )

    def plain_literals(self) -> set[str]:
        """Tokens that are matched in text but are not special."""
        return {token.content for token in self._added.values() if not token.special}

    def cover(self, text: str, cover: Cover, allowed: Collection[str] = ()) -> str:
        """`text` with every token in it covered, but for `allowed` ones. Raises StandInsExhausted.

        A part of a token at an end is covered too: the template might hold its other half.
        """
        while spans := self._spans(text, allowed):
            text = cover.over(text, spans)
        edges = self._edges(text)
        return cover.over(text, edges) if edges else text

    def encode(self, rendered: str, cover: Cover) -> list[int]:
        """Ids of a rendered text: tokens of the template as such, all else as ordinary text."""
        texts, tokens, at = [], [], 0
        for token_id, start, end in self._spelt(rendered):
            texts.append(rendered[at:start])
            tokens.append(token_id)
            at = end
        texts.append(rendered[at:])
        # One character holds the place of each token, so that a segment is still encoded as
        # what follows a token, not as the beginning of a text.
        place = cover.fresh()
        text = place.join(cover.lift(part) for part in texts)
        plain = self._plain_tokenizer(place)
        encoding = text_encoding(plain, text)
        place_id = plain.token_to_id(place)
        own = iter(tokens)
        return [
            # An id may be the model's as well, where its vocabulary has gaps.
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
        """The added tokens that `text` spells: id, start and end.

        Places are asked for one by one: those of a long text, all at once, hold the interpreter.
        """
        encoding = text_encoding(self._tokenizer, text)
        for index, token_id in enumerate(encoding.ids):
            if (token := self._added.get(token_id)) is not None:
                start, end = _span(encoding, index)
                if self._spells(text[start:end], token):
                    yield token_id, start, end

    def _spells(self, text: str, token: AddedToken) -> bool:
        """Is the token here because `text` spells it? The unknown token may not be."""
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
        """The same model and splitting (shared, not copied) with one token of its own."""
        plain = Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            plain.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        plain.add_special_tokens([AddedToken(place, special=True, normalized=False)])
        return plain


def _span(encoding: Encoding, index: int) -> tuple[int, int]:
    """Where in the text the token at `index` is; nowhere for a token that no text has made."""
    return encoding.token_to_chars(index) or (0, 0)
