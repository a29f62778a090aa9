"""How long one request body holds the front's event loop, for hostile bodies at the size limit.

    python -m tokenloom.bench.body_cost [--context 131072] [--max-body-bytes 4194304]

Each body is read by the code that the doors use, up to the point where texts are tokenised or the
request is refused; the processor time is the least of a few tries. Nothing of it yields to other
requests, so this is what everybody else's stream waits.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable

from ..tokenizer_proc.doors import native, openai_requests
from ..tokenizer_proc.doors.body import read_prompt
from ..tokenizer_proc.doors.client_frames import read_message
from ..tokenizer_proc.limits import MAX_REQUEST_BYTES, body_limit
from ..wire.door_config import DoorConfig
from ..wire.sampling import InvalidRequest

TRIES = 5
Reader = Callable[[bytes, int], object]


def read_chat(body: bytes, context: int) -> object:
    request = openai_requests.read_chat(body)
    return openai_requests.chat_messages(request.messages), openai_requests.chat_sampling(request)


def read_completion(body: bytes, context: int) -> object:
    request = openai_requests.read_completion(body)
    params = openai_requests.completion_sampling(request)
    return params, read_prompt(request.prompt, "prompt", context)


def read_generate(body: bytes, context: int) -> object:
    request = native.generate_reader.read(body)
    _, prompt = native.prompt_of(request, context)
    count = len(prompt) if isinstance(prompt, list) else 1
    return native.read_sampling(request.sampling_params, count)


def read_frame(body: bytes, context: int) -> object:
    return read_message(body)


def filled(before: bytes, entry: bytes, after: bytes, size: int) -> bytes:
    """Return a body of about `size` bytes that repeats `entry`, separated by commas."""
    count = max(1, (size - len(before) - len(after)) // (len(entry) + 1))
    return before + b",".join([entry] * count) + after


def keys(before: bytes, after: bytes, size: int) -> bytes:
    """Return a body with as many different keys as fit."""
    count = (size - len(before) - len(after)) // 12
    return before + b",".join(b'"1%06d":1' % index for index in range(count)) + after


def hostile(size: int) -> dict[str, tuple[Reader, bytes]]:
    """Return name -> (reader, body of about `size` bytes) for HTTP."""
    generate = b'{"text":"hi","sampling_params":{"max_new_tokens":1},'
    chat = b'{"messages":[{"role":"user","content":"a"}],'
    nested = size // 2
    return {
        "ignored field: {}": (read_generate, filled(generate + b'"zzz":[', b"{}", b"]}", size)),
        "ignored field: {} and a NaN": (
            read_generate,
            filled(generate + b'"zzz":[', b"{}", b",NaN]}", size),
        ),
        "ignored field: []": (read_generate, filled(generate + b'"zzz":[', b"[]", b"]}", size)),
        "ignored field: keys": (read_generate, keys(generate + b'"zzz":{', b"}}", size)),
        "ignored field: depth": (
            read_generate,
            generate + b'"zzz":' + b"[" * nested + b"]" * nested + b"}",
        ),
        "unknown keys": (read_generate, keys(generate, b"}", size)),
        "unknown keys in a chat": (read_chat, filled(chat, b'"":1', b"}", size)),
        "tools: {}": (read_chat, filled(chat + b'"tools":[', b"{}", b"]}", size)),
        "regex: text": (read_generate, filled(generate + b'"regex":"', b"a", b'"}', size)),
        "input_ids": (read_generate, filled(b'{"input_ids":[', b"1", b"]}", size)),
        "input_ids: [1]": (read_generate, filled(b'{"input_ids":[', b"[1]", b"]}", size)),
        "input_ids: []": (read_generate, filled(b'{"input_ids":[', b"[]", b"]}", size)),
        "text: texts": (read_generate, filled(b'{"text":[', b'"ab"', b"]}", size)),
        "lora_path: nulls": (
            read_generate,
            filled(generate + b'"lora_path":[', b"null", b"]}", size),
        ),
        "prompt: texts": (read_completion, filled(b'{"prompt":[', b'"ab"', b"]}", size)),
        "prompt: []": (read_completion, filled(b'{"prompt":[', b"[]", b"]}", size)),
        "prompt: escapes": (read_completion, filled(b'{"prompt":"', b"\\u00e9", b'"}', size)),
        "sampling_params: {}": (
            read_generate,
            filled(b'{"text":"a","sampling_params":[', b"{}", b"]}", size),
        ),
        "rid: texts": (read_generate, filled(generate + b'"rid":[', b'"ab"', b"]}", size)),
        "stop: texts": (read_chat, filled(chat + b'"stop":[', b'"ab"', b"]}", size)),
        "stop_token_ids": (read_chat, filled(chat + b'"stop_token_ids":[', b"1", b"]}", size)),
        "logit_bias": (read_chat, keys(chat + b'"logit_bias":{', b"}}", size)),
        "messages": (read_chat, filled(b'{"messages":[', b'{"role":"user"}', b"]}", size)),
        "messages: {}": (read_chat, filled(b'{"messages":[', b"{}", b"]}", size)),
        "parts of content": (
            read_chat,
            filled(
                b'{"messages":[{"role":"user","content":[',
                b'{"type":"text","text":"a"}',
                b"]}]}",
                size,
            ),
        ),
        "tool_calls": (
            read_chat,
            filled(b'{"messages":[{"role":"user","tool_calls":[', b"1", b"]}]}", size),
        ),
    }


def hostile_frames(size: int) -> dict[str, tuple[Reader, bytes]]:
    """Return name -> (reader, frame of about `size` bytes) for the socket door."""
    asked = b'{"type":"generate","rid":"a",'
    sampling = asked + b'"text":"a","sampling":{'
    size32 = (size - 64).to_bytes(4, "big")
    packed = b"\x83\xa4type\xa8generate\xa3rid\xa1a"
    return {
        "socket, JSON: input_ids": (
            read_frame,
            filled(asked + b'"input_ids":[', b"1", b"]}", size),
        ),
        "socket, JSON: messages": (
            read_frame,
            filled(asked + b'"messages":[', b'{"role":"user","content":""}', b"]}", size),
        ),
        "socket, JSON: logit_bias": (read_frame, keys(sampling + b'"logit_bias":{', b"}}}", size)),
        "socket, JSON: stop": (read_frame, filled(sampling + b'"stop":[', b'"ab"', b"]}}", size)),
        "socket, JSON: 1 MiB of logit_bias": (
            read_frame,
            keys(sampling + b'"logit_bias":{', b"}}}", 1 << 20),
        ),
        "socket, msgpack: input_ids": (
            read_frame,
            packed + b"\xa9input_ids\xdd" + size32 + b"\x01" * (size - 64),
        ),
        "socket, msgpack: stop": (
            read_frame,
            packed + b"\xa8sampling\x81\xa4stop\xdd" + size32 + b"\xa0" * (size - 64),
        ),
    }


def cost(reader: Reader, body: bytes, context: int) -> tuple[float, str]:
    """Return the least processor time in seconds, and the outcome for the body."""
    best, said = float("inf"), "accepted"
    for _ in range(TRIES):
        gc.collect()
        begun = time.process_time()
        try:
            reader(body, context)
        except InvalidRequest as error:
            said = error.message
        best = min(best, time.process_time() - begun)
    return best, said


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tokenloom.bench.body_cost")
    parser.add_argument("--context", type=int, default=131072, help="tokens")
    parser.add_argument("--max-body-bytes", type=int, default=DoorConfig().max_body_bytes)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    size = body_limit(options.context, options.max_body_bytes)
    worst = 0.0
    for name, (reader, body) in (hostile(size) | hostile_frames(MAX_REQUEST_BYTES)).items():
        seconds, said = cost(reader, body, options.context)
        worst = max(worst, seconds)
        if options.json:
            print(json.dumps({"case": name, "bytes": len(body), "ms": seconds * 1e3}))
        else:
            print(f"{name:34} {len(body) / 1e6:4.1f} MB {seconds * 1e3:6.1f} ms  {said[:70]}")
    if not options.json:
        print(f"{'worst':34} {worst * 1e3:14.1f} ms")


if __name__ == "__main__":
    main()
