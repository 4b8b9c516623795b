"""Checks every extra of the project alone, each in a fresh environment.

`.ci/extras.py` checks the package without extras, and then with each of them;
`.ci/extras.py store docs` checks these two. The environments are made anew in
`.venv-extras`. This needs `uv`, which the extra `dev` installs: it makes an environment
from its cache in a few seconds.

The environments stay: `.ci/run` builds the docs with `.venv-extras/docs`, and runs the
benchmarks with `.venv-extras/benchmarks`.
"""

import ast
import concurrent.futures
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator


ROOT = pathlib.Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-extras"
NONE = "none"
# These need an older JAX; `benchmarks` says how to install them.
OTHER_VERSIONS = {"kfac_jax", "neural_tangents"}


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]


def imports(code: str, *, nested: bool = True) -> Iterator[str]:
    """The modules that code imports, also those within functions if `nested`."""
    tree = ast.parse(code)
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def import_all(texts: Iterable[str], *, nested: bool = True) -> None:
    """Imports whatever these programs import."""
    modules = {name for text in texts for name in imports(text, nested=nested)}
    assert "eqxbatch" in modules, "No file was found."
    for name in sorted(modules):
        if name.partition(".")[0] not in OTHER_VERSIONS:
            importlib.import_module(name)


def read(paths: Iterable[pathlib.Path]) -> list[str]:
    return [path.read_text() for path in paths]


def check_none() -> None:
    """The package works, and errors name the extra that is missing."""
    import jax.numpy as jnp

    import eqxbatch

    def linear(x, y):
        return x @ y.T

    x = jnp.ones((5, 3))
    mapped = eqxbatch.filter_micro_vmap(jnp.sum, microbatch_size=2)(x)
    assert mapped.tolist() == [3.0] * 5

    def stored() -> None:
        store = eqxbatch.ZarrStore("kernel")
        eqxbatch.filter_batch_kernel(linear, block_size=2, store=store)(x)

    def shown() -> None:
        progress = eqxbatch.TqdmProgressMeter()
        eqxbatch.filter_batch_kernel(linear, block_size=2, progress=progress)(x)

    uses = {
        "store": stored,
        "progress": shown,
        "linalg": lambda: eqxbatch.HessianOperator,
    }
    for extra, use in uses.items():
        message = f"no error without the extra {extra!r}"
        try:
            use()
        except ImportError as e:
            message = str(e)
        assert f'pip install "equinox-batch[{extra}]"' in message, message


def check_store() -> None:
    """A kernel is written to a ZarrStore, and read."""
    import jax.numpy as jnp
    import numpy as np

    import eqxbatch

    x = jnp.arange(15.0).reshape(5, 3)
    batched = eqxbatch.filter_batch_kernel(
        lambda x, y: x @ y.T, block_size=2, store=eqxbatch.ZarrStore("kernel.zarr")
    )
    np.testing.assert_allclose(batched(x)[...], x @ x.T)
    # The second call opens what the first one stored.
    np.testing.assert_allclose(batched(x)[...], x @ x.T)


def check_cloud() -> None:
    """A kernel is written to a store of obstore, and URLs are opened."""
    import numpy as np
    import obstore.store
    import zarr

    import eqxbatch

    x = np.arange(15.0).reshape(5, 3)
    store = zarr.storage.ObjectStore(obstore.store.MemoryStore())
    batched = eqxbatch.filter_batch_kernel(
        lambda x, y: x @ y.T, block_size=2, store=store
    )
    np.testing.assert_allclose(batched(x)[...], x @ x.T)
    assert obstore.store.from_url("s3://bucket/kernel").prefix == "kernel"


def check_progress() -> None:
    """A progress bar counts the blocks of a kernel."""
    import contextlib
    import io

    import jax.numpy as jnp

    import eqxbatch

    x = jnp.ones((5, 3))
    progress = eqxbatch.TqdmProgressMeter("linear kernel")
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        eqxbatch.filter_batch_kernel(
            lambda x, y: x @ y.T, block_size=2, progress=progress
        )(x)
    assert "linear kernel: 100%" in shown.getvalue(), shown.getvalue()


def check_linalg() -> None:
    """Solve with the operators in lineax, and multiply with them in matfree."""
    import jax
    import jax.numpy as jnp
    import lineax as lx
    import matfree.decomp
    import numpy as np

    import eqxbatch

    x = jax.random.normal(jax.random.key(0), (9, 3))
    weights = jnp.ones(3)

    def predict(weights, x):
        return weights @ x

    def half_square(prediction, x):
        return prediction**2 / 2

    def loss(weights, x):
        return half_square(predict(weights, x), x)

    dense = x.T @ x / 9
    settings = {"in_axes": 0, "microbatch_size": 4}
    for operator in (
        eqxbatch.HessianOperator(loss, weights, x, **settings),
        eqxbatch.GGNOperator(predict, half_square, weights, x, **settings),
    ):
        np.testing.assert_allclose(operator.as_matrix(), dense, rtol=1e-4)
        damped = operator + lx.IdentityLinearOperator(operator.in_structure())
        damped = lx.TaggedLinearOperator(damped, lx.positive_semidefinite_tag)
        solved = lx.linear_solve(damped, weights, lx.CG(rtol=1e-6, atol=1e-6)).value
        expected = np.linalg.solve(dense + np.eye(3), weights)
        np.testing.assert_allclose(solved, expected, rtol=1e-4)
        found = eqxbatch.curvature_solve(operator, weights, damping=1.0).solution
        np.testing.assert_allclose(found, expected, rtol=1e-3)
        tridiagonal = matfree.decomp.tridiag_sym(3, materialize=True)
        lanczos = tridiagonal(operator.mv, jnp.array([1.0, 2.0, 3.0]))
        np.testing.assert_allclose(
            np.linalg.eigvalsh(lanczos.J_small), np.linalg.eigvalsh(dense), rtol=1e-3
        )
    kernel = eqxbatch.KernelOperator(jnp.dot, x, x, pairwise=True)
    np.testing.assert_allclose(kernel.as_matrix(), x @ x.T, rtol=1e-5, atol=1e-5)
    kernel = eqxbatch.KernelOperator(jnp.dot, x, pairwise=True, symmetric=True)
    y = jnp.arange(9.0)
    found = eqxbatch.kernel_solve(kernel, y, ridge=1.0, preconditioner_rank=2)
    expected = np.linalg.solve(x @ x.T + np.eye(9), y)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-4, atol=1e-4)


def check_examples() -> None:
    """What the examples import is installed. The docs build runs them."""
    import_all(read((ROOT / "examples").glob("*.py")))


def check_docs() -> None:
    """What the pages import is installed, and MkDocs finds all plugins."""
    pages = read([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    blocks = [
        block
        for page in pages
        for block in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    ]
    # Doctests and signatures are not parsed.
    import_all(block for block in blocks if re.search(r"^(import|from) ", block, re.M))
    # Scripts of the docs import each other.
    sys.path.append(str(ROOT / "docs" / "theme"))
    scripts = [*(ROOT / "docs").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    import_all(read(scripts))
    config = importlib.import_module("mkdocs.config")
    config.load_config(str(ROOT / "mkdocs.yml"))
    run_tools("mkdocs", "ruff")


def check_benchmarks() -> None:
    """What the benchmarks import is installed. `.ci/run` runs them."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module("benchmarks.__main__")
    import_all(read((ROOT / "benchmarks").glob("*.py")), nested=False)


def check_models() -> None:
    """The packages with the models of `benchmarks/models.py` are installed."""
    import_all(read((ROOT / "benchmarks").glob("*.py")))


def check_test() -> None:
    """What the tests import is installed. `.ci/run` runs them."""
    sys.path.insert(0, str(ROOT))
    import_all(read((ROOT / "tests").rglob("*.py")))


def check_dev() -> None:
    """The tools run."""
    run_tools("ruff", "pyright", "pre-commit", "pytest", "coverage", "mkdocs", "uv")
    for module in ("build", "pytest_cov", "xdist"):
        importlib.import_module(module)


def run_tools(*names: str) -> None:
    """Runs programs of this environment."""
    for name in names:
        program = pathlib.Path(sysconfig.get_path("scripts")) / name
        subprocess.run([program, "--version"], check=True, capture_output=True)


CHECKS = {
    NONE: check_none,
    "store": check_store,
    "cloud": check_cloud,
    "progress": check_progress,
    "linalg": check_linalg,
    "examples": check_examples,
    "docs": check_docs,
    "benchmarks": check_benchmarks,
    "models": check_models,
    "test": check_test,
    "dev": check_dev,
}


def make(name: str, extra: str = "") -> pathlib.Path:
    """A fresh environment with the package and one extra; returns its Python.

    The extra is that of the same name, unless another one is named.
    """
    where = ENVIRONMENTS / name
    shutil.rmtree(where, ignore_errors=True)
    what = str(ROOT) if name == NONE else f"{ROOT}[{extra or name}]"
    python = where / "bin" / "python"
    run_uv("venv", "--quiet", "--python", sys.executable, str(where))
    install(str(python), "--editable", what)
    return python


def install(python: str, *packages: str) -> None:
    """Installs packages in an environment."""
    run_uv("pip", "install", "--quiet", "--python", python, *packages)


def run_uv(*arguments: str) -> None:
    # uv leaves the environment that it runs in alone.
    variables = {key: x for key, x in os.environ.items() if key != "VIRTUAL_ENV"}
    command = [sys.executable, "-m", "uv", *arguments]
    subprocess.run(command, check=True, env=variables)


def main(names: list[str]) -> None:
    assert {*CHECKS} == {NONE, *extras()}, (
        "Each extra of pyproject.toml has a check here, and no other has one."
    )
    unknown = {*names} - {*CHECKS}
    assert not unknown, f"No such extras: {unknown}"
    # Each takes one core, or waits for files.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(try_out, names or CHECKS):
            print(line, flush=True)


def try_out(name: str) -> str:
    """Installs one extra and checks it; returns how long both took."""
    begin = time.monotonic()
    python = make(name)
    made = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [python, pathlib.Path(__file__).resolve(), "--check", name]
        subprocess.run(command, check=True, cwd=folder)
    done = time.monotonic()
    return (
        f"{name:<12} installed in {made - begin:4.1f} s, "
        f"checked in {done - made:4.1f} s"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        CHECKS[sys.argv[2]]()
    else:
        main(sys.argv[1:])
