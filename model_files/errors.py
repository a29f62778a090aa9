"""Errors of models and adapters that cannot be served. Raised by all readers of their files."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ModelError(ValueError):
    """A model that cannot be served; the message says why and what to do."""


class AdapterError(ModelError):
    """A LoRA adapter that cannot be served with this model. The model is still served."""


def names_the_file(
    read: Callable[Concatenate[str, P], R],
) -> Callable[Concatenate[str, P], R]:
    """Decorate a reader whose first argument is a path, to add the path to its ModelErrors."""

    @wraps(read)
    def named(path: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(path, *args, **kwargs)
        except ModelError as error:
            if path in str(error):
                raise
            raise type(error)(f"{path}: {error}") from error

    return named
