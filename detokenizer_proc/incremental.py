"""Decodes token ids to text incrementally: no half characters, and no delivered text changes. PURE.

Called by `streams`, one decoder per request. `decode` is the tokenizer's, called on short windows
of ids, so a token costs the same however long the answer is. Vocabularies, stop strings and
messages must not enter.

A tail of U+FFFD may be the beginning of a character whose other bytes are still to come, so it is
held back. A character has at most four bytes and a token adds at least one: what three newer tokens
did not complete is delivered as U+FFFD.

A prompt may also end inside a character. Its U+FFFD counts as delivered with the prompt; if the
answer completes the character, the whole character belongs to the answer.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
_UNFINISHED = 3  # most tokens, and most replacement characters, of an incomplete character
_CONTEXT = 8  # ids kept as context for the next word's space if the last id has no text
_SILENT = 16  # most leading ids without text that are kept as context


class IncrementalDecoder:
    """Decoder of one answer: the deltas of all pushes and the flush add up to the answer's text.

    That text is decode(prompt + answer) without the prefix it shares with decode(prompt). The
    prefix is all of decode(prompt), except for a final U+FFFD that the answer completes.

    One exception: if the vocabulary has byte tokens and the model generates invalid UTF-8, a whole
    decode may replace valid neighbouring characters by U+FFFD. If those were delivered, they stay.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_tail: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        whole, text, unfinished = _split_prompt(decode, list(prompt_tail))
        # Delivered ids in front of the pending ones when decoding, and their text.
        self._context, self._context_text = whole, text
        self._pending = unfinished  # ids whose text is not fully delivered
        self._text = self._pending_text() if unfinished else ""  # text of the pending ids
        self._sent = len(self._text)  # characters of it delivered, or part of the prompt

    def push(self, ids: Sequence[int]) -> str:
        """Decode ids; return the text that is final. Pushing one by one gives the same text."""
        return "".join([self._push(token_id) for token_id in ids])

    def flush(self) -> str:
        """Return the remaining text, with U+FFFD for incomplete characters."""
        return self._settle() if self._pending else ""

    def _push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        if text == self._text and not self._decode([token_id]):
            self._pass_over(self._pending.pop())
            return ""
        while not text.startswith(self._text[: self._sent]):
            self._sent -= 1  # the answer completed the prompt's U+FFFD
        self._text = text
        solid = len(text.rstrip(REPLACEMENT))
        if solid == len(text):
            return self._settle()
        certain = max(solid, len(text) - _UNFINISHED, self._sent)
        delta = text[self._sent : certain]
        self._sent = certain
        return delta + self._give_up_on_old()

    def _pass_over(self, silent_id: int) -> None:
        """Skip an id without text, such as a special token, as context for the next word's space.

        Keep it if there is no other context: a first space may have no text but make a second show.
        """
        if not self._pending and not self._context_text and len(self._context) < _SILENT:
            self._context.append(silent_id)

    def _pending_text(self) -> str:
        if not self._context:
            return self._decode(self._pending)
        text = self._decode(self._context + self._pending)
        if not self._context_text and text.startswith(REPLACEMENT):
            # A context without text may be part of a broken character, so decode without it.
            return self._decode(self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # An invalid byte changed the context's text, which is delivered: decode without it.
        self._context, self._context_text = [], ""
        return self._decode(self._pending)

    def _settle(self) -> str:
        """Deliver all pending text and make the pending ids the next context."""
        delta = self._text[self._sent :]
        context, text = self._pending, self._decode(self._pending)
        if not text:  # such as a space that is stripped at the start of a text
            context, text = _whole_start(self._decode, (self._context + context)[-_CONTEXT:])
        self._context, self._context_text = context, text
        self._pending, self._text, self._sent = [], "", 0
        return delta

    def _give_up_on_old(self) -> str:
        """Drop all but the last _UNFINISHED pending ids; return the text that becomes final."""
        if len(self._pending) <= _UNFINISHED:
            return ""
        unsent = self._text[self._sent :]
        self._context, self._context_text = [], ""
        self._pending = self._pending[-_UNFINISHED:]
        self._text = self._decode(self._pending)
        if not self._text.endswith(REPLACEMENT):
            # Only the dropped ids made them invalid.
            self._sent = 0
            return self._settle()
        # Count from the right: dropping ids may split a character on the left.
        self._sent = max(0, len(self._text) - len(unsent))
        return unsent[: max(0, len(unsent) - len(self._text))]


def _split_prompt(
    decode: Callable[[Sequence[int]], str], ids: list[int]
) -> tuple[list[int], str, list[int]]:
    """Split into context ids, their text, and last ids that may begin a character."""
    for count in range(min(_UNFINISHED, len(ids)) + 1):
        while count == 1 and not decode(ids[-1:]):
            ids = ids[:-1]  # a special token has no text and does not split a character
        whole, text = _whole_start(decode, ids[: len(ids) - count])
        if not text.endswith(REPLACEMENT):
            return whole, text, ids[len(ids) - count :]
    return [], "", ids[-_UNFINISHED:]


def _whole_start(decode: Callable[[Sequence[int]], str], ids: list[int]) -> tuple[list[int], str]:
    """Return ids and their text without leading ids that are the rest of a split character."""
    for cut in range(min(_UNFINISHED, len(ids)) + 1):
        text = decode(ids[cut:]) if ids[cut:] else ""
        if text and not text.startswith(REPLACEMENT):
            return ids[cut:], text
    return ids, decode(ids) if ids else ""
