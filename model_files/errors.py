"""ModelError: a model or an adapter that cannot be served, named with the reason and what to do."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ModelError(ValueError):
    pass


class AdapterError(ModelError):
    """A LoRA adapter that cannot be served with this model; the model itself is not touched."""


def names_the_file(
    read: Callable[Concatenate[str, P], R],
) -> Callable[Concatenate[str, P], R]:
    """Decorate a reader of a path: its ModelErrors name the path, so that it need not."""

    @wraps(read)
    def named(path: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(path, *args, **kwargs)
        except ModelError as error:
            if path in str(error):
                raise
            raise type(error)(f"{path}: {error}") from error

    return named
