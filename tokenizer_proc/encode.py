"""Raw prompts to token ids, and how the front gets its two ways from a request to ids.

Called by the front with text that the doors have bounded. Chat messages are `chat`'s, sampling and
lengths of contexts are the scheduler's.
"""

from tokenizers import Tokenizer

from ..model_files.chat_template import read_chat_template
from ..model_files.tokenizer import load_tokenizer, read_special_tokens, text_ids
from ..wire.sampling import InvalidRequest
from .chat import ChatRenderer


class TextEncoder:
    """A raw prompt is the client's own: special tokens spelled in it count as such."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        probe = tokenizer.encode("a")
        front = probe.special_tokens_mask.index(0) if 0 in probe.special_tokens_mask else 0
        self._bos: list[int] = probe.ids[:front]  # empty if the tokenizer adds none

    def encode(self, text: str, param: str = "text") -> list[int]:
        """Ids, with BOS in front where the tokenizer adds it and the text does not begin with it.

        Raises InvalidRequest for `param` if there is nothing to compute or no valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(param, f"{param} holds a lone surrogate: {error}") from error
        # EOS, which some tokenizers add as well, would end the prompt that is to be continued.
        ids = text_ids(self._tokenizer, text)
        if ids[: len(self._bos)] != self._bos:
            ids = self._bos + ids
        if not ids:
            raise InvalidRequest(param, f"{param} is empty: the model has no token for it")
        return ids


def load_text(path: str) -> tuple[TextEncoder, ChatRenderer]:
    """Both encoders of the model at `path`, over one tokenizer. Raises ModelError."""
    tokenizer = load_tokenizer(path)
    renderer = ChatRenderer(tokenizer, read_chat_template(path), read_special_tokens(path))
    return TextEncoder(tokenizer), renderer
