"""Clients of a tokenloom server over its socket door: AsyncClient, Client and `tokenloom chat`.

    from tokenloom.client import Client

    with Client(port=30000) as client:
        for delta in client.generate("Once upon a time", max_new_tokens=40, temperature=0.7):
            print(delta.text, end="", flush=True)

On the same machine a server is found by its HTTP port; `address="tcp://..."` reaches one started
with `--socket`.
"""

from ..wire.client_messages import ChatMessage, Delta, Pong, Usage
from .aio import AsyncClient, AsyncGeneration, Completion, Timeouts
from .errors import ClientError, RequestRefused, RequestTimeout, ServerGone
from .sync import Client, Generation

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "ChatMessage",
    "Client",
    "ClientError",
    "Completion",
    "Delta",
    "Generation",
    "Pong",
    "RequestRefused",
    "RequestTimeout",
    "ServerGone",
    "Timeouts",
    "Usage",
]
