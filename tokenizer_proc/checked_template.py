"""Render conversations so that every message is in the prompt; otherwise refuse, naming the
message.

Called by `chat`. Many templates silently drop an unknown role or a system message that is not the
first. A probe renders placeholders with the same roles; a placeholder missing from the output would
be dropped. The result is cached per sequence of roles, so an ordinary conversation is rendered
once. Token ids do not enter.
"""

from collections.abc import Sequence
from functools import lru_cache

from ..model_files.template_engine import ChatTemplate, TemplateRefusal

_KEPT_SEQUENCES = 512

Fields = dict[str, str]  # a message as the template sees it: role, content, perhaps name


class CheckedTemplate:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._placeholder_left_out = lru_cache(_KEPT_SEQUENCES)(self._probe)
        # A template without a developer role gets those messages as system messages.
        self._developer = "developer" if self._writes_developer() else "system"

    def render(self, messages: Sequence[Fields]) -> str:
        """Render the prompt. Raises TemplateRefusal, also if a message would be dropped."""
        known = [self._in_known_role(message) for message in messages]
        rendered = self._template.render(known)
        missing = self._first_left_out(known, rendered)
        if missing is not None:
            raise TemplateRefusal(
                f"messages[{missing}]: it writes nothing of this {messages[missing]['role']} "
                "message at this place"
            )
        return rendered

    def _in_known_role(self, message: Fields) -> Fields:
        return message | {"role": self._developer} if message["role"] == "developer" else message

    def _first_left_out(self, messages: Sequence[Fields], rendered: str) -> int | None:
        try:
            return self._placeholder_left_out(tuple(message["role"] for message in messages))
        except TemplateRefusal:
            # The template parses contents and refused the placeholders, so look for the real
            # contents instead.
            contents = (message["content"].strip() for message in messages)
            return next((i for i, content in enumerate(contents) if content not in rendered), None)

    def _probe(self, roles: tuple[str, ...]) -> int | None:
        """Return the index of the first dropped message, or None. Raises TemplateRefusal."""
        # Plain letters and digits: a template may strip, split or quote contents.
        texts = [f"Zq{index}message{index}qz" for index in range(len(roles))]
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
        ]
        rendered = self._template.render(messages)
        return next((index for index, text in enumerate(texts) if text not in rendered), None)

    def _writes_developer(self) -> bool:
        """Return whether the template names the developer role and renders its content.

        A template that copies any role into the prompt does not count: the model may not know the
        role.
        """
        if "developer" not in self._template.source:
            return False
        try:
            return self._probe(("developer", "user")) is None
        except TemplateRefusal:
            return False
