"""Writes what pages of the docs take from elsewhere, in place.

`python docs/theme/pages.py` does it, and with `--check` only names the pages that are
not current. A page has comments of these kinds, each with an `end`:

- `<!-- api eqxbatch.EmpiricalNTK: diagonal -->`: signature and docstring of a public
  name, and of some of its members.
- `<!-- file benchmarks/results/grid.md -->`: a file; lines 3 to 8 of it with `:3:8`.

References in pages and docstrings, which have a name in backticks and brackets with
empty brackets behind, become links to the entries of the API pages. So all pages can be
read as files. As a hook of MkDocs, this script leads links to the pages of the site.
"""

import os
import pathlib
import re
import sys
from typing import Any


ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(pathlib.Path(__file__).parent))
DOCS = ROOT / "docs"
MARKED = re.compile(
    r"^<!-- (?P<kind>api|file) (?P<what>\S+?)(?:: (?P<members>[\w, ]+))? -->\n"
    r"(?:.*?\n)??<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
REFERENCE = re.compile(r"\[(`[^`\]]+`|[^`\]]+)\]\[(eqxbatch[\w.]*)?\]")
# What the search of the site counts for more.
BOOSTS = {
    "all_of_eqxbatch.md": 2,
    "coming_from.md": 2,
    "errors.md": 3,
    "gradients.md": 2,
    "kfac.md": 2,
    "recipes.md": 2,
    "streams.md": 2,
    "which.md": 2,
}


def sources() -> list[pathlib.Path]:
    """The pages that are written."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def anchor(name: str) -> str:
    """That of a heading, by GitHub and by Python-Markdown."""
    return re.sub(r"[^\w-]", "", name.removeprefix("eqxbatch.")).lower()


def entries() -> dict[str, tuple[pathlib.Path, str]]:
    """The page and the anchor of each name on the API pages."""
    found = {}
    for path in sorted((DOCS / "api").glob("*.md")):
        for mark in MARKED.finditer(path.read_text()):
            if mark["kind"] == "api":
                names = [mark["what"], *members(mark)]
                found |= {name: (path, anchor(name)) for name in names}
    return found


def members(mark: re.Match[str]) -> list[str]:
    listed = filter(None, (mark["members"] or "").split(", "))
    return [f"{mark['what']}.{member}" for member in listed]


def linked(text: str, folder: pathlib.Path) -> str:
    """A text with links in place of references, as seen from a folder."""

    def link(found: re.Match[str]) -> str:
        name = found[2] or found[1].strip("`")
        if name not in ENTRIES:
            return found[0]
        path, at = ENTRIES[name]
        return f"[{found[1]}]({os.path.relpath(path, folder)}#{at})"

    return REFERENCE.sub(link, text)


def content(mark: re.Match[str]) -> str:
    """What stands between a comment and its end."""
    if mark["kind"] == "api":
        import api

        names = [name.rpartition(".")[2] for name in members(mark)]
        return api.entry(mark["what"], names)
    name, *bounds = mark["what"].split(":")
    lines = (ROOT / name).read_text().splitlines()
    if bounds:
        first, last = map(int, bounds)
        lines = lines[first - 1 : last]
    text = "\n".join(lines).strip("\n")
    language = {".bib": "bibtex"}.get(pathlib.Path(name).suffix)
    return text if language is None else f"```{language}\n{text}\n```"


def written(path: pathlib.Path) -> str:
    """A page as it should be."""

    def marked(mark: re.Match[str]) -> str:
        begin = mark[0].partition("\n")[0]
        return f"{begin}\n\n{content(mark)}\n\n<!-- end -->"

    text = MARKED.sub(marked, path.read_text())
    text = linked(text, path.parent)
    return text.replace(f"]({path.name}#", "](#")


def outdated() -> list[str]:
    """The pages that are not current."""
    return [
        str(path.relative_to(ROOT))
        for path in sources()
        if written(path) != path.read_text()
    ]


ENTRIES = entries()


# Hooks of MkDocs: the examples and the history are pages of the site, too.

LINKS = (
    (re.compile(r"\]\((?:\.\./)+examples/README\.md"), "](examples/index.md"),
    (re.compile(r"\]\((?:\.\./)+examples/(\w+)\.py"), r"](examples/\1.md"),
    (re.compile(r"\]\((?:\.\./)+CHANGELOG\.md"), "](changelog.md"),
)


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    pictures = sorted((ROOT / "examples" / "pictures").glob("*"))
    added = {
        "changelog.md": ROOT / "CHANGELOG.md",
        "examples/index.md": ROOT / "examples" / "README.md",
        **{f"examples/pictures/{path.name}": path for path in pictures},
    }
    for name, path in added.items():
        file = File.generated(
            config, name, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED
        )
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    name = page.file.src_uri
    if name in BOOSTS or name.startswith("api/"):
        page.meta.setdefault("search", {"boost": BOOSTS.get(name, 2)})
    markdown = linked(markdown, (DOCS / name).parent)
    if name == "changelog.md":
        return markdown.replace("](docs/", "](")
    if name == "examples/index.md":
        markdown = re.sub(r"\]\((\w+)\.py\)", r"](\1.md)", markdown)
        return markdown.replace("](../docs/", "](../")
    up = "../" * name.count("/")
    for pattern, new in LINKS:
        markdown = pattern.sub(new.replace("](", f"]({up}"), markdown)
    return markdown


def main() -> int:
    stale = outdated()
    if "--check" in sys.argv[1:]:
        print("\n".join(stale) or "All pages are current.")
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).write_text(written(ROOT / name))
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
