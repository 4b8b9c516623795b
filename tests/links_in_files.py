"""Links, anchors and pictures of Markdown files, as a viewer of files follows them.

Run `python -m tests.links_in_files` for the pages of this repository.
"""

import pathlib
import re
import sys
import urllib.parse


FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]*(?:\([^()\s]*\))?)\)")
HEADING = re.compile(r"^#+ +(.*?)\s*$", re.MULTILINE)
# What only a build of the site understands.
MARKS = {
    "reference": re.compile(r"\]\[(?:eqxbatch\b[\w.]*)?\]"),
    "include": re.compile(r"^\s*--8<--", re.MULTILINE),
    "directive": re.compile(r"^\s*(?:::: \S|\?\?\?|!!!|=== \")", re.MULTILINE),
    "attribute": re.compile(r"\{ ?[:#.]?[\w=-]+ ?\}$", re.MULTILINE),
    "front matter": re.compile(r"\A---\n"),
}


def slug(heading: str) -> str:
    """The anchor of a heading on GitHub."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(path: pathlib.Path) -> set[str]:
    text = FENCE.sub("", path.read_text())
    return {slug(found[1]) for found in HEADING.finditer(text)}


def problems(path: pathlib.Path) -> list[str]:
    """What a reader of the file trips over, one line each."""
    text = CODE.sub("code", FENCE.sub("", path.read_text()))
    found = []
    for is_picture, words, target in LINK.findall(text):
        parts = urllib.parse.urlsplit(target)
        if parts.scheme:
            continue
        file = (path.parent / parts.path).resolve() if parts.path else path
        if not file.exists():
            found.append(f"no such file: {target}")
        elif parts.fragment and parts.fragment not in anchors(file):
            found.append(f"no such anchor: {target}")
        if is_picture and not words.strip():
            found.append(f"no alt text: {target}")
    for name, mark in MARKS.items():
        found += [f"{name}: {x[0].strip()}" for x in mark.finditer(text)]
    return found


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    folders = "*.md", "docs/**/*.md", "examples/*.md"
    return sorted(path for folder in folders for path in root.glob(folder))


def main() -> int:
    root = pathlib.Path(__file__).parent.parent
    found = [
        f"{path.relative_to(root)}: {problem}"
        for path in pages(root)
        for problem in problems(path)
    ]
    print("\n".join(found) or "All pages can be read as files.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
