"""Raw prompts to token ids, and loading of both encoders (raw text and chat).

Called by the front with text whose size the doors have bounded. Chat messages belong to `chat`,
context lengths to `lengths`.
"""

from tokenizers import Tokenizer

from ..model_files.chat_template import read_chat_template
from ..model_files.tokenizer import load_tokenizer, read_special_tokens, text_ids
from ..wire.sampling import InvalidRequest
from .chat import ChatRenderer


class TextEncoder:
    """Encoder of raw prompts, in which spelled special tokens count as such."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        probe = tokenizer.encode("a")
        front = probe.special_tokens_mask.index(0) if 0 in probe.special_tokens_mask else 0
        self._bos: list[int] = probe.ids[:front]  # empty if the tokenizer adds none

    def encode(self, text: str, param: str = "text") -> list[int]:
        """Encode `text`, with BOS in front if the tokenizer adds it and the text does not begin
        with it.

        Raises InvalidRequest for `param` if there are no tokens or the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(param, f"{param} holds a lone surrogate: {error}") from error
        # Some tokenizers add EOS too, which would end the prompt.
        ids = text_ids(self._tokenizer, text)
        if ids[: len(self._bos)] != self._bos:
            ids = self._bos + ids
        if not ids:
            raise InvalidRequest(param, f"{param} is empty: the model has no token for it")
        return ids


def load_text(path: str) -> tuple[TextEncoder, ChatRenderer]:
    """Load both encoders of the model at `path`, over one tokenizer. Raises ModelError."""
    tokenizer = load_tokenizer(path)
    renderer = ChatRenderer(tokenizer, read_chat_template(path), read_special_tokens(path))
    return TextEncoder(tokenizer), renderer
