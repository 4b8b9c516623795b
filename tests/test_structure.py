"""The rules of the code base that can be checked by looking at it."""

import ast
import importlib
import inspect
import pathlib
import pkgutil
import re

import pytest

import eqxbatch
from eqxbatch._sites import rules, view_rules


pytestmark = pytest.mark.quick


ROOT = pathlib.Path(eqxbatch.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Which folders each folder may import from.
FEATURES = ("_maps", "_gradients", "_curvature", "_kernels")
BELOW = {"_base": (), "_batch": ("_base",), "_sites": ("_base", "_batch")}
BELOW |= dict.fromkeys(FEATURES, ("_base", "_batch", "_sites"))
# Kernels in the metric of a curvature matrix.
BELOW["_ntk"] = ("_base", "_batch", "_sites", "_maps", "_curvature", "_kernels")
# Steps take the kernel of a model, and its Gauss-Newton matrix.
BELOW["_steps"] = tuple(BELOW)
BELOW["_check"] = tuple(BELOW)


def modules():
    for info in pkgutil.walk_packages([str(ROOT)], "eqxbatch."):
        yield importlib.import_module(info.name)


def imports(path):
    """The absolute names of all that a file imports."""
    package = ["eqxbatch", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names)


def test_all_folders_are_known():
    assert {path.parent.name for path in FILES} == {*BELOW, "eqxbatch"}


@pytest.mark.parametrize("folder", BELOW)
def test_imports_point_downwards(folder):
    allowed = (folder, *BELOW[folder])
    for path in (ROOT / folder).glob("*.py"):
        found = {name.split(".")[1] for name in imports(path) if name[:8] == "eqxbatch"}
        assert found <= {*allowed}, path


def test_folders_say_what_is_in_them():
    for folder in BELOW:
        doc = importlib.import_module(f"eqxbatch.{folder}").__doc__
        named = [other for other in BELOW if f"`{other}`" in doc]
        assert named == [x for x in BELOW if x in BELOW[folder]] or folder == "_check"


def test_no_two_files_have_one_name():
    names = [path.name for path in FILES if path.name != "__init__.py"]
    assert len(names) == len({*names})


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_private_modules_of_others(path):
    for name in imports(path):
        top, *rest = name.split(".")
        if top in ("jax", "equinox", "optax", "jaxtyping"):
            private = [part for part in rest if part.startswith("_")]
            assert not private, name
            assert "internal" not in rest, name


def test_all_transitive_checks_see_files():
    # The two tests above are void if they look in the wrong place.
    assert len(FILES) > 10
    assert any("eqxbatch._base" in name for path in FILES for name in imports(path))


_VARIABLES = ("__abstractvars__", "__abstractclassvars__")


def test_classes_are_abstract_or_final():
    classes = {
        cls
        for module in modules()
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__.startswith("eqxbatch")
    }
    assert len(classes) > 15
    for cls in classes:
        # In Equinox, a class is abstract, too, if it leaves a field or a class variable
        # open.
        is_open = any(cls.__dict__.get(name) for name in _VARIABLES)
        is_abstract = inspect.isabstract(cls) or is_open
        named_abstract = cls.__name__.lstrip("_").startswith("Abstract")
        assert is_abstract == named_abstract, cls
        for base in cls.__mro__[1:]:
            if not base.__module__.startswith("eqxbatch"):
                continue
            assert base.__name__.lstrip("_").startswith("Abstract"), (cls, base)
            for name in vars(base):
                if callable(getattr(base, name)) and not name.startswith("__"):
                    concrete = name not in base.__abstractmethods__
                    assert not (concrete and name in vars(cls)), (cls, name)


def test_public_names_are_documented():
    api = pathlib.Path(__file__).parent.parent / "docs" / "api"
    text = "\n".join(path.read_text() for path in api.glob("*.md"))
    for module in (eqxbatch, eqxbatch.results):
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and not inspect.ismodule(value)
        ]
        assert len(names) > 10
        for name in names:
            doc = inspect.getdoc(getattr(module, name))
            assert doc, name
            # What users only ever receive is shown where it comes from.
            is_received = module is eqxbatch.results or name in ("Block", "Blocks")
            assert ">>>" in doc or is_received, name
            assert re.search(rf"^<!-- api {module.__name__}\.{name}\b", text, re.M), (
                name
            )


def test_version():
    assert eqxbatch.__version__.count(".") == 2


def test_test_modules_do_not_import_from_each_other():
    found = [
        (path.name, node.module)
        for path in pathlib.Path(__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and "test_" in (node.module or "")
    ]
    # What they share has modules of its own.
    assert found == []


VERSIONS = ROOT / "_base" / "versions.py"
# What asks for something that may not be there, and what has gone or is to go.
ASKS = ("getattr", "hasattr")
JAX = ("jax", "jaxlib")
OLD = (
    "ClosedJaxpr",
    "pcast",
    "pvary",
    "vma",
    "manual_axis_type",
    "ft_in",
    "enable_x64",
)


def of_versions(path):
    """What a file does that depends on the version of JAX, as line and text."""
    tree = ast.parse(path.read_text())
    # Names of what comes from JAX, such as `jax`, `lax`, `jex` and `Tracer`.
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                if f"{module}.{alias.name}".strip(".").split(".")[0] in JAX:
                    named.add((alias.asname or alias.name).split(".")[0])
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id in ASKS:
            text = ast.unparse(node.args[0])
            # Settings are asked for by name because type checkers do not know them.
            is_setting = text == "jax.config"
            if text.split(".")[0] in named and not is_setting:
                yield node.lineno, ast.unparse(node)
            if node.args[1:] and ast.unparse(node.args[1]).strip("'") in OLD:
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr in OLD:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "'ft_in'":
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.ImportFrom):
            old = [alias.name for alias in node.names if alias.name in OLD]
            yield from ((node.lineno, name) for name in old)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.search(r"\b(jax|jaxlib|JAX) (<|>|=|0\.\d)|version_info", line):
            yield number, line.strip()


def test_only_one_file_depends_on_versions_of_jax():
    assert len({*of_versions(VERSIONS)}) > 10
    for path in FILES:
        if path != VERSIONS:
            assert [*of_versions(path)] == [], path


def test_rules_of_primitives_have_worked_examples():
    # One that is to be read before its code has numbers.
    for rule in {*rules._RULES.values(), *view_rules._VIEWS.values()}:
        assert re.search(r"\d", inspect.getdoc(rule) or ""), rule
