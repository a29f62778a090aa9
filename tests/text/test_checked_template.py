"""CheckedTemplate: every message is in the prompt, or the call is refused and the message named.

Each template here is of a kind that public templates have.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tokenloom.model_files.template_engine import ChatTemplate, TemplateRefusal
from tokenloom.tokenizer_proc.checked_template import CheckedTemplate

COPIES = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
KNOWS_THREE = """{% for m in messages %}
{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}
{% endfor %}"""
SYSTEM_FIRST = """{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}
{% for m in messages %}
{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}
{% if m.role == 'assistant' %}<assistant>{{ m.content.split('</think>')[-1] }}{% endif %}
{% endfor %}"""
LAST_SYSTEM = """{% set ns = namespace(system='') %}
{% for m in messages %}
{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}
{% endfor %}{{ ns.system }}
{% for m in messages %}{% if m.role != 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"""
KNOWS_DEVELOPER = """{% for m in messages %}
{% if m.role == 'developer' %}<developer>{{ m.content }}{% endif %}
{% if m.role == 'user' %}<user>{{ m.content | tojson }}{% endif %}
{% endfor %}"""
NAMES_DEVELOPER = "{# no developer #}" + KNOWS_THREE
REFUSES_OTHERS = """{% for m in messages %}
{% if m.role not in ['user', 'system'] %}{{ raise_exception('no developer') }}{% endif %}
<{{ m.role }}>{{ m.content }}
{% endfor %}"""
# It takes an answer apart, refuses one that has no parts, and shows the second part alone.
PARTS = """{% for m in messages %}{% set parts = m.content.split(':') %}
{% if parts | length < 2 %}{{ raise_exception('no colon') }}{% endif %}
{% if m.role == 'tool' %}{{ parts[1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"""


def render(source: str, *turns: tuple[str, str]) -> str:
    checked = CheckedTemplate(ChatTemplate(source, {}))
    return checked.render([{"role": role, "content": content} for role, content in turns])


@pytest.mark.parametrize(
    "source", [COPIES, KNOWS_THREE, SYSTEM_FIRST, NAMES_DEVELOPER, REFUSES_OTHERS]
)
def test_a_developer_is_the_system_of_a_template_that_has_none(source: str) -> None:
    rendered = render(source, ("developer", "Be brief."), ("user", "Hi"))
    assert rendered == render(source, ("system", "Be brief."), ("user", "Hi"))
    assert "<system>Be brief." in rendered


def test_a_developer_stays_one_where_the_template_writes_it() -> None:
    assert "<developer>Be brief." in render(
        KNOWS_DEVELOPER, ("developer", "Be brief."), ("user", "Hi")
    )


@pytest.mark.parametrize(
    ("source", "roles", "index"),
    [
        (KNOWS_THREE, ("user", "tool"), 1),
        (KNOWS_DEVELOPER, ("system", "user"), 0),
        (SYSTEM_FIRST, ("user", "system", "user"), 1),
        (SYSTEM_FIRST, ("system", "developer", "user"), 1),
        (SYSTEM_FIRST, ("user", "assistant", "tool", "user"), 2),
        (LAST_SYSTEM, ("system", "user", "system"), 0),
        ("nothing at all", ("user",), 0),
        ("{{ messages[-1].content }}", ("user", "assistant", "user"), 0),
    ],
)
def test_a_message_that_is_left_out_is_named(source: str, roles: Sequence[str], index: int) -> None:
    # The contents are in the rendering for another reason: all are the same letter.
    with pytest.raises(TemplateRefusal, match=rf"messages\[{index}\].*{roles[index]} message"):
        render(source, *((role, "n") for role in roles))


def test_other_messages_of_the_same_templates_are_rendered() -> None:
    assert "<assistant>done" in render(
        SYSTEM_FIRST, ("user", "a"), ("assistant", "<think></think>done")
    )
    assert render(LAST_SYSTEM, ("system", "s"), ("user", "u"), ("user", "")) == "s\n[u][]"
    assert '<user>"\\""' in render(KNOWS_DEVELOPER, ("user", '"'))


def test_where_placeholders_are_refused_the_contents_themselves_are_looked_for() -> None:
    assert render(PARTS, ("user", "a:b"), ("assistant", " c:d ")) == "a:b c:d "
    with pytest.raises(TemplateRefusal, match=r"messages\[1\]"):
        render(PARTS, ("user", "a:b"), ("tool", "c:d"))
    with pytest.raises(TemplateRefusal, match="no colon"):
        render(PARTS, ("user", "a"))


class Counting(ChatTemplate):
    renderings = 0

    def render(self, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401  # passed on
        self.renderings += 1
        return super().render(*args, **kwargs)


def test_a_sequence_of_roles_is_probed_once() -> None:
    template = Counting(SYSTEM_FIRST, {})
    checked = CheckedTemplate(template)
    assert template.renderings == 0
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for _ in range(5):
        checked.render(turns)
    assert template.renderings == 6
