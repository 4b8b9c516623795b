"""Another project with a package of the same import name."""

import importlib.metadata
import warnings

import pytest

import eqxbatch
from eqxbatch._base.installed import installed_version


def installed(folder, name, version):
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.quick
def test_another_project_in_the_same_folder(tmp_path, monkeypatch):
    ours = tmp_path / "eqxbatch" / "__init__.py"
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "equinox-batch", "9.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert installed_version(str(ours)) == "9.1"
    installed(tmp_path, "eqxbatch", "0.3.0")
    match = "same folder: `equinox-batch 9.1`, and `eqxbatch 0.3.0`.*`pip uninstall eqx"
    with pytest.warns(UserWarning, match=match):
        assert installed_version(str(ours)) == "9.1"
    # Those of a checkout are its own, wherever the other project is.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed_version(eqxbatch.__file__)


@pytest.mark.quick
def test_files_of_no_distribution(monkeypatch):
    """As where another project was uninstalled, or files were copied."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    match = "imported from .*, but the distribution `equinox-batch`, whose files these"
    with pytest.raises(ImportError, match=match):
        installed_version(eqxbatch.__file__)
