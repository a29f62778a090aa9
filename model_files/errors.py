"""ModelError: a model or an adapter that cannot be served, named with the reason and what to do."""


class ModelError(ValueError):
    pass


class AdapterError(ModelError):
    """A LoRA adapter that cannot be served with this model; the model itself is not touched."""
