"""Token ids to text, piece by piece: never half a character, never taken back. PURE.

Called by `streams`, one decoder per request. It knows nothing of vocabularies: `decode` is the
tokenizer's own, asked about short windows of ids, so a token costs the same however long the
answer is. Stop strings and messages do not enter.

A tail of U+FFFD may be the beginning of a character whose other bytes are still to come, so it
waits. A character has at most four bytes and a token adds at least one: what three newer tokens
did not complete never will be, and goes out as it is.

A prompt may end inside a character too. Its U+FFFD counts as shown with the prompt; if the answer
completes the character, the whole character belongs to the answer.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
_UNFINISHED = 3  # tokens, and replacement characters, that a beginning character can take
_CONTEXT = 8  # ids that give the next word its space where the last one alone shows nothing
_SILENT = 16  # ids at the very start that show nothing and are still kept as context


class IncrementalDecoder:
    """The deltas of all pushes and the flush concatenate to what the answer adds to the prompt.

    With `before = decode(prompt)` and `after = decode(prompt + answer)` that is `after` without
    the beginning that both have in common. `before` is all of this beginning, except where it ends
    in the U+FFFD of a character that the answer completes.

    The one exception: where a vocabulary spells characters with byte tokens and the model makes
    invalid UTF-8, a whole decode may turn neighbouring good characters into U+FFFD after the
    fact. Those have been delivered, and stay.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_tail: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        whole, text, unfinished = _split_prompt(decode, list(prompt_tail))
        # Delivered ids that the next ones are decoded after, and their text.
        self._context, self._context_text = whole, text
        self._pending = unfinished  # ids whose text is not wholly delivered
        self._text = self._pending_text() if unfinished else ""  # what they add to the context's
        self._sent = len(self._text)  # how much of that is delivered, or shown with the prompt

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain. Pushing one by one or together gives the same text."""
        return "".join([self._push(token_id) for token_id in ids])

    def flush(self) -> str:
        """The rest, with U+FFFD for what stayed unfinished."""
        return self._settle() if self._pending else ""

    def _push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        if text == self._text and not self._decode([token_id]):
            self._pass_over(self._pending.pop())
            return ""
        while not text.startswith(self._text[: self._sent]):
            self._sent -= 1  # what the prompt showed as U+FFFD has become a character
        self._text = text
        solid = len(text.rstrip(REPLACEMENT))
        if solid == len(text):
            return self._settle()
        certain = max(solid, len(text) - _UNFINISHED, self._sent)
        delta = text[self._sent : certain]
        self._sent = certain
        return delta + self._give_up_on_old()

    def _pass_over(self, silent_id: int) -> None:
        """An id without text, such as a special token, is no context for the next word's space.

        Unless it is all there is: a first space may be silent and make the second one show.
        """
        if not self._pending and not self._context_text and len(self._context) < _SILENT:
            self._context.append(silent_id)

    def _pending_text(self) -> str:
        if not self._context:
            return self._decode(self._pending)
        text = self._decode(self._context + self._pending)
        if not self._context_text and text.startswith(REPLACEMENT):
            # A silent context is there for a space, and might be a byte that gets spoilt itself.
            return self._decode(self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # An invalid byte spoilt the bytes before it too, which are delivered: leave them out.
        self._context, self._context_text = [], ""
        return self._decode(self._pending)

    def _settle(self) -> str:
        """Deliver all that is pending, and let it be the context of what comes."""
        delta = self._text[self._sent :]
        context, text = self._pending, self._decode(self._pending)
        if not text:  # a space that shows only after something
            context, text = _whole_start(self._decode, (self._context + context)[-_CONTEXT:])
        self._context, self._context_text = context, text
        self._pending, self._text, self._sent = [], "", 0
        return delta

    def _give_up_on_old(self) -> str:
        """Keep the last few pending ids alone, which is all that a character can still need."""
        if len(self._pending) <= _UNFINISHED:
            return ""
        unsent = self._text[self._sent :]
        self._context, self._context_text = [], ""
        self._pending = self._pending[-_UNFINISHED:]
        self._text = self._decode(self._pending)
        if not self._text.endswith(REPLACEMENT):
            # What came before had spoilt them; by themselves they are good.
            self._sent = 0
            return self._settle()
        # Counted from the right, since cutting may split a character on the left.
        self._sent = max(0, len(self._text) - len(unsent))
        return unsent[: max(0, len(unsent) - len(self._text))]


def _split_prompt(
    decode: Callable[[Sequence[int]], str], ids: list[int]
) -> tuple[list[int], str, list[int]]:
    """Context ids, their text, and the last ids that may be the beginning of a character."""
    for count in range(min(_UNFINISHED, len(ids)) + 1):
        while count == 1 and not decode(ids[-1:]):
            ids = ids[:-1]  # a special token, which shows nothing and parts no character
        whole, text = _whole_start(decode, ids[: len(ids) - count])
        if not text.endswith(REPLACEMENT):
            return whole, text, ids[len(ids) - count :]
    return [], "", ids[-_UNFINISHED:]


def _whole_start(decode: Callable[[Sequence[int]], str], ids: list[int]) -> tuple[list[int], str]:
    """Context ids and their text, without the rest of a character that a cut left in front."""
    for cut in range(min(_UNFINISHED, len(ids)) + 1):
        text = decode(ids[cut:]) if ids[cut:] else ""
        if text and not text.startswith(REPLACEMENT):
            return ids[cut:], text
    return ids, decode(ids) if ids else ""
