"""Twenty varied prompts and their greedy ids: texts over HTTP, chats over the socket.

Prompts are texts; the oracle encodes them itself with transformers.
"""

import asyncio
from dataclasses import dataclass

import httpx
from support.server import PATIENCE_S, Server

from tokenloom.client import AsyncClient, Timeouts

MAX_NEW = 16
_WORDS = ["river", "keeps", "its", "own", "time", "while", "boats", "stones", "and", "birds", "go"]
TIMEOUTS = Timeouts(connect=PATIENCE_S, answer=PATIENCE_S, idle=PATIENCE_S, heartbeat=60.0)


@dataclass(frozen=True)
class Prompt:
    name: str
    text: str = ""
    chat: tuple[tuple[str, str], ...] = ()  # (role, content)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.chat]


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


def _long_text(words: int) -> str:
    """Return text without a short period, so that a wrong position shows."""
    picked = [
        _WORDS[i * i % 31 % len(_WORDS)] + ("." if i % 17 == 16 else "") for i in range(words)
    ]
    return " ".join(picked)


_SHOP = ("system", "You sell flowers. Answer in one sentence.")

PROMPTS = [
    Prompt("one letter", "A"),
    Prompt("fact", "The capital of France is"),
    Prompt("story", "Once upon a time, in a village by the sea,"),
    Prompt("spaces", "  indented   and \t tabbed\n\n\n   "),
    Prompt("numbers", "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, "),
    Prompt("python", "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return "),
    Prompt("c", "#include <stdio.h>\n\nint main(int argc, char **argv) {\n\tfor (int i = 0;"),
    Prompt("json", '{"name": "Ada", "born": 1815, "languages": ["English", "'),
    Prompt("sql", "SELECT name, COUNT(*) FROM users WHERE created_at > '2024-01-01' GROUP BY"),
    Prompt("chinese", "床前明月光\uff0c疑是地上霜。举头望明月\uff0c"),
    Prompt("japanese", "吾輩は猫である。名前はまだ無い。どこで生れたか"),
    Prompt("korean", "안녕하세요. 오늘 날씨가"),
    Prompt("arabic and hindi", "مرحبا بالعالم नमस्ते दुनिया"),
    Prompt("emoji", "🙂🙃😀 👩\u200d👩\u200d👧 🇩🇪🇫🇷 party 🎉🎉🎉"),
    Prompt("markup", "<html>\n<head><title>A page</title></head>\n<body>\n<h1>"),
    Prompt("chat", chat=(("user", "What is the capital of Italy?"),)),
    Prompt("chat with a system", chat=(_SHOP, ("user", "Do you have tulips?"))),
    Prompt(
        "chat with turns",
        chat=(
            _SHOP,
            ("user", "Do you have tulips?"),
            ("assistant", "Yes, in red and in yellow."),
            ("user", "Ten yellow ones, please. \u00bfCuánto cuestan? 谢谢 🌷"),
        ),
    ),
    Prompt("300 tokens", _long_text(280)),
    Prompt("1500 tokens", "Read this and go on.\n" + _long_text(1450)),
]


async def ask(server: Server, prompts: list[Prompt]) -> list[Answer]:
    """Send all prompts concurrently."""
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http,
        AsyncClient(server.door, timeout=TIMEOUTS) as socket,
    ):
        return await asyncio.gather(*(_ask_one(http, socket, prompt) for prompt in prompts))


async def _ask_one(http: httpx.AsyncClient, socket: AsyncClient, prompt: Prompt) -> Answer:
    if prompt.chat:
        done = await socket.complete(
            messages=prompt.messages, max_new_tokens=MAX_NEW, temperature=0.0
        )
        usage = done.usage
        return Answer(tuple(done.token_ids), usage.prompt_tokens, usage.cached_tokens)
    sampling = {"max_new_tokens": MAX_NEW, "temperature": 0.0}
    answer = await http.post("/generate", json={"text": prompt.text, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    meta = answer.json()["meta_info"]
    return Answer(tuple(answer.json()["output_ids"]), meta["prompt_tokens"], meta["cached_tokens"])
