"""Packages that are only needed for some things."""

import importlib
from typing import Any


def import_extra(module: str, what: str, extra: str) -> Any:
    """Imports a module of a package that may not be there.

    Raises `ImportError` then, with how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ImportError(
            f'`{what}` needs {package}: pip install "eqxbatch[{extra}]".'
        ) from e
