"""`tokenloom bench`: load a running server and report what it did.

Called by cli. Owns the sequence of a run, the progress bar and the output; flags, workloads,
driving and statistics are elsewhere.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Self

import uvloop
from tqdm import tqdm

from ..client import AsyncClient, ClientError
from ..client.aio import DEFAULT_PORT
from ..model_files.errors import ModelError
from ..wire.channel import AddressTooLong
from ..wire.paths import BadAddress, UnsafeDirectory
from .http_stream import HttpClient
from .load import Driver, Run, run_workload
from .report import as_json, result_of, show
from .serve_flags import flags_shape, parse_flags
from .summary import Record
from .targets import Dialect, HttpTarget, SocketTarget, Target, first_model
from .vocabulary import Vocabulary, load_vocabulary
from .workloads import DEFAULT_ALPHABET, Closed, Source, Stream, Workload, independent


def main(argv: list[str]) -> int:
    """Run it; return 0 all answered, 1 something failed, 2 wrong flags, 130 Ctrl-C."""
    flags = parse_flags(argv)
    try:
        vocabulary = load_vocabulary(flags.tokenizer) if flags.tokenizer else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run, model = runner.run(_bench(flags, vocabulary))
    except (BadAddress, AddressTooLong, UnsafeDirectory, ModelError, ClientError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"no server at {_address(flags)}: {error}")
    except ValueError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    result = result_of(run)
    print(show(result, f"{flags.workload} on {model} at {_address(flags)}"))
    if flags.json is not None:
        said = {"model": model, "flags": _settings(flags), "result": result}
        flags.json.write_bytes(as_json(said))
    return 1 if result.total.errors else 0


async def _bench(flags: argparse.Namespace, vocabulary: Vocabulary | None) -> tuple[Run, str]:
    """Return the run and the model's name. Raises OSError or ValueError without such a server."""
    alphabet = vocabulary.words if vocabulary else DEFAULT_ALPHABET
    source = Source(flags.seed, alphabet)
    workload = flags.build(flags, source)
    async with _target(flags, vocabulary) as (target, model):
        driver = Driver(target, flags.timeout, vocabulary.encode if vocabulary else None)
        if flags.warmup:
            first = independent(source, flags.warmup, flags_shape(flags), name="warmup")
            await run_workload((Stream("warmup", first, Closed(1)),), driver)
        with Progress(workload) as progress:
            return await run_workload(workload, replace(driver, on_record=progress)), model


@contextlib.asynccontextmanager
async def _target(
    flags: argparse.Namespace, vocabulary: Vocabulary | None
) -> AsyncIterator[tuple[Target, str]]:
    target: Target
    if flags.socket is not None:
        client = _socket_client(flags.socket)
        target, model = SocketTarget(client), (await client.ping()).model
    else:
        decode = vocabulary.decode if vocabulary and flags.text_prompts else None
        headers = {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else None
        http = HttpClient(_address(flags), headers)
        model = flags.model or await first_model(http)
        target = HttpTarget(http, model, Dialect(decode=decode))
    try:
        yield target, model
    finally:
        await target.aclose()


def _address(flags: argparse.Namespace) -> str:
    return str(flags.socket or flags.base_url or f"http://127.0.0.1:{DEFAULT_PORT}")


def _socket_client(address: str) -> AsyncClient:
    return AsyncClient(port=int(address)) if address.isdecimal() else AsyncClient(address)


class Progress:
    """Progress bar over the requests that end a run, on a terminal only."""

    def __init__(self, workload: Workload) -> None:
        counted = [stream for stream in workload if not stream.background]
        total = sum(len(session) for stream in counted for session in stream.sessions)
        self._labels = {stream.label for stream in counted}
        self._bar = tqdm(total=total, unit="request", disable=None, file=sys.stderr, leave=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.close()

    def __call__(self, record: Record) -> None:
        if record.label in self._labels:
            self._bar.update()


def _settings(flags: argparse.Namespace) -> dict[str, object]:
    """Return the flags without secrets, for the report."""
    hidden = {"build", "api_key", "json"}
    return {name: value for name, value in vars(flags).items() if name not in hidden}


def _fail(message: str) -> int:
    print(f"tokenloom bench: {message}", file=sys.stderr, flush=True)
    return 1
