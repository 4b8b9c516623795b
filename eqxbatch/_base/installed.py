"""Whose files these are: another project has a package of the same import name."""

import importlib.metadata
import pathlib
import warnings


_OURS, _OTHER = "equinox-batch", "eqxbatch"


_REMEDY = f"Run `pip uninstall {_OTHER} {_OURS}`, and then `pip install {_OURS}`."


def installed_version(file: str) -> str:
    """The version of the distribution of this package, whose `__init__.py` is `file`.

    Warns if another project has been installed into the same folder: what pip installed
    last has overwritten files of the other, and to uninstall one breaks both. Raises
    `ImportError` if the distribution of these files is not installed.
    """
    try:
        version = importlib.metadata.version(_OURS)
    except importlib.metadata.PackageNotFoundError as e:
        raise ImportError(
            f"`{_OTHER}` is imported from {file}, but the distribution `{_OURS}`, "
            f"whose files these should be, is not installed. {_REMEDY}"
        ) from e
    try:
        other = importlib.metadata.distribution(_OTHER)
    except importlib.metadata.PackageNotFoundError:
        return version
    path = pathlib.Path(str(other.locate_file(f"{_OTHER}/__init__.py")))
    if path.resolve() == pathlib.Path(file).resolve():
        warnings.warn(
            f"Two projects have installed a package `{_OTHER}` into the same folder: "
            f"`{_OURS} {version}`, and `{_OTHER} {other.version}`, which is another "
            f"one. They overwrite each other's files. {_REMEDY}",
            stacklevel=3,
        )
    return version
