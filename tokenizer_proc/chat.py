"""Chat messages to token ids, through the model's own chat template.

Called by the front with messages whose size the doors have bounded. Every message reaches the
prompt or the call is refused, and no message can inject a special token: see `checked_template` and
`content_guard`.
"""

from tokenizers import Tokenizer

from ..model_files.template_engine import ChatTemplate, TemplateRefusal
from ..model_files.tokenizer import text_ids
from ..wire.client_messages import ChatMessage
from ..wire.sampling import InvalidRequest
from .checked_template import CheckedTemplate
from .content_guard import ContentGuard, Cover, StandInsExhausted
from .limits import MAX_MESSAGES


class ChatRenderer:
    def __init__(
        self, tokenizer: Tokenizer, template: str | None, special_tokens: dict[str, str]
    ) -> None:
        """Take `special_tokens` (role -> token) as template variables. Raises ModelError."""
        self._tokenizer = tokenizer
        self._guard = ContentGuard(tokenizer)
        self._fixed = (template or "", *special_tokens.values())
        self._template: CheckedTemplate | None = None
        if template is not None:
            self._template = CheckedTemplate(ChatTemplate(template, special_tokens))
        # Markers such as <think> that a model writes and its template parses in assistant messages.
        self._own_marks = {t for t in self._guard.plain_literals() if t in self._fixed[0]}

    def encode(self, messages: list[ChatMessage]) -> list[int]:
        """Encode a conversation up to the opening of the assistant's answer.

        The template alone decides on BOS. Raises InvalidRequest for "messages".
        """
        if self._template is None:
            raise InvalidRequest("messages", "the model has no chat template; send a plain prompt")
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                "messages", f"messages must be 1 to {MAX_MESSAGES}, got {len(messages)}"
            )
        cover = Cover(lambda: self._characters(messages))
        try:
            covered = [self._covered(message, cover) for message in messages]
            rendered = self._template.render(covered)
            ids = self._ids(rendered, cover)
        except TemplateRefusal as error:
            raise InvalidRequest("messages", f"the chat template refuses: {error}") from error
        except StandInsExhausted as error:
            raise InvalidRequest("messages", str(error)) from error
        if not ids:
            raise InvalidRequest("messages", "the chat template makes nothing of these messages")
        return ids

    def _ids(self, text: str, cover: Cover) -> list[int]:
        if cover.used:
            return self._guard.encode(text, cover)
        return text_ids(self._tokenizer, text)

    def _covered(self, message: ChatMessage, cover: Cover) -> dict[str, str]:
        allowed = self._own_marks if message.role == "assistant" else ()
        content = self._guard.cover(message.content, cover, allowed)
        # Roles need no cover: they come from a fixed list, and templates build tokens from them.
        fields = {"role": message.role, "content": content}
        if message.name is not None:
            fields["name"] = self._guard.cover(message.name, cover)
        return fields

    def _characters(self, messages: list[ChatMessage]) -> set[str]:
        return set().union(*self._fixed, *(m.content + (m.name or "") for m in messages))
