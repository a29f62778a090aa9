"""Public chat templates: each message that is given reaches the prompt, or the call is refused."""

from functools import cache
from itertools import product
from pathlib import Path

import pytest
from support.public_templates import public_templates
from tokenizers import Tokenizer

from tokenloom.model_files.resolve import resolve_model
from tokenloom.model_files.tokenizer import load_tokenizer
from tokenloom.tokenizer_proc.chat import ChatRenderer
from tokenloom.wire.client_messages import ChatMessage
from tokenloom.wire.sampling import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
CONVERSATIONS = [
    *product(ROLES, repeat=1),
    *product(ROLES, repeat=2),
    ("system", "user", "assistant"),
    ("system", "user", "assistant", "user"),
    ("developer", "user", "assistant", "user"),
    ("system", "developer", "user"),
    ("developer", "system", "user"),
    ("user", "system", "user"),
    ("user", "developer", "user"),
    ("user", "assistant", "tool", "user"),
    ("user", "assistant", "user", "assistant", "user", "assistant"),
    ("system", "user", "user", "assistant", "assistant", "user"),
]
WORDS = ("alder oak", "birch", "cedar and elm", "fir", "hazel", "larch")

needs_templates = pytest.mark.skipif(
    not public_templates(), reason="not fetched: run tests/support/public_templates.py"
)


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(None, None))


def prompt(renderer: ChatRenderer, roles: tuple[str, ...]) -> str | None:
    """None if the call is refused."""
    messages = [
        ChatMessage(role, words)  # type: ignore[arg-type]
        for role, words in zip(roles, WORDS, strict=False)
    ]
    try:
        ids = renderer.encode(messages)
    except InvalidRequest:
        return None
    return str(tokenizer().decode(ids, skip_special_tokens=False))


def renderer(path: Path) -> ChatRenderer:
    roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return ChatRenderer(tokenizer(), path.read_text(encoding="utf-8"), roles)


@needs_templates
@pytest.mark.slow
def test_no_message_is_lost_without_a_word() -> None:
    served: dict[tuple[str, ...], int] = {}
    for path in public_templates():
        chat = renderer(path)
        for roles in CONVERSATIONS:
            text = prompt(chat, roles)
            if text is not None:
                lost = [words for words in WORDS[: len(roles)] if words not in text]
                assert not lost, (path.name, roles)
                served[roles] = served.get(roles, 0) + 1
        if prompt(chat, ("system", "user")) is not None:
            assert prompt(chat, ("developer", "user")) is not None, path.name
    # Refusing everything would keep the law as well.
    assert len(public_templates()) >= 50
    for roles in (("user",), ("system", "user", "assistant", "user"), ("developer", "user")):
        assert served[roles] > 0.9 * len(public_templates()), roles
