"""The HTTP door: routes, and answers to unknown paths and methods.

An ASGI application over one Front; `server` runs it with uvicorn. Starlette only routes: no
middleware (its answers are plain text), no response objects, no documentation pages, no CORS.
"""

import difflib
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from ..errors import quoted
from ..front import Front
from ..limits import MAX_QUOTED_CHARS, body_limit
from . import lora_routes, native, openai_routes, service
from .asgi import Exchange
from .body_budget import BodyBudget
from .delivery import told
from .errors import ApiError, ClientGone
from .web_guard import WebGuard

Handler = Callable[[Front, Exchange], Awaitable[None]]

_GET = ("GET", "HEAD")  # must not change state: any web page can make a browser send them
# path, methods, handler
_ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/v1/chat/completions", ("POST",), openai_routes.chat),
    ("/v1/completions", ("POST",), openai_routes.completions),
    ("/v1/models", _GET, openai_routes.models),
    ("/v1/models/{model:path}", _GET, openai_routes.model),
    ("/generate", ("POST", "PUT"), native.generate),
    ("/load_lora_adapter", ("POST",), lora_routes.load),
    ("/unload_lora_adapter", ("POST",), lora_routes.unload),
    ("/v1/load_lora_adapter", ("POST",), lora_routes.load_as_vllm),
    ("/v1/unload_lora_adapter", ("POST",), lora_routes.unload_as_vllm),
    ("/flush_cache", ("POST",), service.flush_cache),
    ("/livez", _GET, service.live),
    ("/health", _GET, service.health),
    ("/health_generate", _GET, service.health_generate),
    ("/get_model_info", _GET, service.model_info),
    ("/model_info", _GET, service.model_info),
    ("/get_server_info", _GET, service.server_info),
    ("/server_info", _GET, service.server_info),
)


class _Endpoint:
    """A handler as an ASGI application that turns every error into an answer."""

    def __init__(
        self, front: Front, handler: Handler, max_body_bytes: int, bodies: BodyBudget
    ) -> None:
        self._front = front
        self._handler = handler
        self._max_body_bytes = max_body_bytes
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info = self._front.info
        limit = body_limit(None if info is None else info.context_length, self._max_body_bytes)
        exchange = Exchange(scope, receive, send, limit, self._bodies)
        try:
            exchange.check_headers()
            await self._handler(self._front, exchange)
        except ClientGone:
            return
        except Exception as error:
            if exchange.started:
                raise
            answer = told(error)
            await exchange.reply(answer.status, answer.body, answer.headers)


class HttpDoor:
    def __init__(self, front: Front, max_body_bytes: int, guard: WebGuard | None = None) -> None:
        routes = []
        self._bodies = BodyBudget()
        for path, methods, handler in _ROUTES:
            route = Route(
                path, _Endpoint(front, handler, max_body_bytes, self._bodies), methods=methods
            )
            route.methods = set(methods)  # Starlette has added HEAD wherever GET is
            routes.append(route)
        self._router = Router(routes, redirect_slashes=False)
        self._max_body_bytes = max_body_bytes
        self._guard = guard or WebGuard()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} is served here")
        scope["app"] = self  # makes the router raise instead of answering in plain text
        try:
            self._guard.check(scope)
            await self._router(scope, receive, send)
        except HTTPException as error:
            await self._refuse(_of_routing(error, scope), scope, receive, send)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._max_body_bytes, self._bodies)
        await exchange.reply(error.status, error.body, error.headers)


def _of_routing(error: HTTPException, scope: Scope) -> ApiError:
    path, method = scope["path"], scope["method"]
    if error.status_code == 405:
        allowed = tuple((name.lower(), value) for name, value in (error.headers or {}).items())
        return ApiError(405, f"{method} is not allowed for {quoted(path)}", headers=allowed)
    near = nearest_route(path)
    hint = "" if near is None else f"; the nearest is {near}"
    return ApiError(404, f"there is no route {method} {quoted(path)}{hint}")


def nearest_route(path: str) -> str | None:
    """Return method and path of the route most similar to `path`; None if none is similar."""
    if len(path) > MAX_QUOTED_CHARS:  # not a typo, and the comparison is quadratic
        return None
    methods = {route: methods[0] for route, methods, _ in _ROUTES if "{" not in route}
    near = difflib.get_close_matches(path, methods, n=1, cutoff=0.7)
    return f"{methods[near[0]]} {near[0]}" if near else None
