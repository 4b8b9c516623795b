"""Builds the wheel and the sdist, and checks what is in them.

`.ci/distributions.py` leaves nothing behind; `.ci/distributions.py dist` leaves both in
`dist`, for a release. It needs `build` and `uv`, which the extra `dev` brings.
"""

import email
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile


ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEM = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}"
LICENCE = (ROOT / "LICENSE").read_bytes()
# What the sdist has besides the package. Git's own `.gitignore` comes along with
# hatchling, which reads it.
BESIDE = {
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "pyproject.toml",
}


def package() -> dict[str, bytes]:
    """The files of the package that Git knows, by their paths."""
    listed = subprocess.run(
        ["git", "ls-files", "--", "eqxbatch"],
        check=True,
        capture_output=True,
        cwd=ROOT,
        text=True,
    )
    found = {path: (ROOT / path).read_bytes() for path in listed.stdout.split()}
    assert "eqxbatch/py.typed" in found
    assert "eqxbatch/__init__.py" in found
    return found


def check_names(kind: str, found: set[str], expected: set[str]) -> None:
    missing, stray = sorted(expected - found), sorted(found - expected)
    assert not missing, f"The {kind} lacks {missing}."
    assert not stray, f"The {kind} has what it should not have: {stray}."


def check_metadata(text: bytes) -> None:
    found = email.message_from_bytes(text)
    assert found["Name"] == PROJECT["name"]
    assert found["Version"] == PROJECT["version"]
    assert found["License-Expression"] == PROJECT["license"]
    assert found["Requires-Python"] == PROJECT["requires-python"]
    assert {*found.get_all("Provides-Extra")} == {*PROJECT["optional-dependencies"]}
    assert found.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    # Extras of another distribution would install somebody else's package.
    assert not any(x.startswith("eqxbatch") for x in found.get_all("Requires-Dist"))


def check_wheel(path: pathlib.Path) -> None:
    assert path.name == f"{STEM}-py3-none-any.whl", path.name
    info = f"{STEM}.dist-info"
    files = package()
    with zipfile.ZipFile(path) as wheel:
        assert wheel.testzip() is None
        names = {x.filename for x in wheel.infolist()}
        about = {f"{info}/{x}" for x in ("METADATA", "WHEEL", "RECORD")}
        about.add(f"{info}/licenses/LICENSE")
        check_names("wheel", names, about | files.keys())
        for name, content in files.items():
            assert wheel.read(name) == content, f"{name} is an old one."
        assert wheel.read(f"{info}/licenses/LICENSE") == LICENCE
        check_metadata(wheel.read(f"{info}/METADATA"))


def check_sdist(path: pathlib.Path) -> None:
    assert path.name == f"{STEM}.tar.gz", path.name
    files = package()
    with tarfile.open(path) as sdist:
        members = sdist.getmembers()
        # A link may point to what the sdist does not have.
        odd = [x.name for x in members if not x.isfile() and not x.isdir()]
        assert not odd, f"Neither files nor folders: {odd}."
        contents = {
            x.name.removeprefix(f"{STEM}/"): sdist.extractfile(x).read()
            for x in members
            if x.isfile()
        }
    check_names("sdist", {*contents}, BESIDE | files.keys())
    for name, content in files.items():
        assert contents[name] == content, f"{name} is an old one."
    assert contents["LICENSE"] == LICENCE
    check_metadata(contents["PKG-INFO"])


def check_install(wheel: pathlib.Path, folder: pathlib.Path) -> None:
    """The wheel works in a fresh environment, away from the checkout."""
    uv, python = [sys.executable, "-m", "uv"], folder / "venv" / "bin" / "python"
    code = (
        "import eqxbatch, pathlib; "
        "folder = pathlib.Path(eqxbatch.__file__).parent; "
        "assert (folder / 'py.typed').exists(); "
        "assert folder.parent.name == 'site-packages', folder; "
        "print(eqxbatch.__version__)"
    )
    for command in (
        [*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")],
        [*uv, "pip", "install", "--quiet", "--python", str(python), str(wheel)],
    ):
        subprocess.run(command, check=True, cwd=folder)
    found = subprocess.run(
        [python, "-c", code], check=True, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert found.stdout.strip() == PROJECT["version"], found.stdout


def main(target: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        built = folder / "dist"
        # The sdist is made first, and the wheel from it.
        build = [sys.executable, "-m", "build", "--installer", "uv"]
        subprocess.run([*build, "--outdir", str(built), str(ROOT)], check=True)
        (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
        check_wheel(wheel)
        check_sdist(sdist)
        check_install(wheel, folder)
        print(f"{wheel.name} and {sdist.name} have what they should have.")
        if target is not None:
            pathlib.Path(target).mkdir(exist_ok=True)
            for path in (wheel, sdist):
                shutil.copy2(path, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
