"""ModelError: a model that cannot be served, named with the reason and what to do."""


class ModelError(ValueError):
    pass
