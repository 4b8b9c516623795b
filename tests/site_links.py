"""Looks for dangling links, anchors and pictures in the built site.

Also for pictures without alt text, and for what comes from other sites.

Run `mkdocs build`, and then `python -m tests.site_links site`.
"""

import argparse
import html.parser
import pathlib
import sys
import urllib.parse


# Schemes of links that do not lead to a page of the site.
OUTSIDE = ("http", "https", "mailto", "data", "javascript")
LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src"}


class Page(html.parser.HTMLParser):
    """The links and anchors of a page, and what it should not have.

    That is pictures without a description, and what it loads from other sites.
    """

    def __init__(self, text: str):
        super().__init__()
        self.links: list[tuple[int, str]] = []
        self.anchors: set[str] = set()
        self.loaded: list[tuple[int, str]] = []
        self.undescribed: list[tuple[int, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        line, _ = self.getpos()
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        target = found.get(LINKS.get(tag, ""))
        if target is not None:
            self.links.append((line, target))
            is_loaded = tag not in ("a", "link") or found.get("rel") == "stylesheet"
            if is_loaded and urllib.parse.urlsplit(target).netloc:
                self.loaded.append((line, target))
        if tag == "img" and not found.get("alt", "").strip():
            self.undescribed.append((line, found.get("src", "")[:60]))


def problems(site: pathlib.Path) -> list[str]:
    """The problems on the pages of a site, one line each."""
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"no pages in {site}"]
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for line, source in page.undescribed:
            found.append(f"{name}:{line}: no alt text: {source}")
        for line, source in page.loaded:
            found.append(f"{name}:{line}: loaded from another site: {source}")
        for line, link in page.links:
            problem = problem_of(link, path, site, pages)
            if problem is not None:
                found.append(f"{name}:{line}: {problem}: {link}")
    return found


def problem_of(
    link: str, path: pathlib.Path, site: pathlib.Path, pages: dict[pathlib.Path, Page]
) -> str | None:
    """The problem of a link on the page in `path`; None if there is none."""
    parts = urllib.parse.urlsplit(link)
    if parts.scheme in OUTSIDE or parts.netloc:
        return None
    where = urllib.parse.unquote(parts.path)
    # Links on the page for wrong addresses (404) start from the root.
    start = site if where.startswith("/") else path.parent
    target = (start / where.lstrip("/")).resolve() if where else path
    if target.is_dir():
        target = target / "index.html"
    if not target.is_relative_to(site):
        return "leads out of the site"
    if not target.is_file():
        return "no such file"
    anchor = urllib.parse.unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "no such anchor"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.site_links", description=__doc__
    )
    parser.add_argument("site", type=pathlib.Path, nargs="?", default="site")
    found = problems(parser.parse_args().site)
    print("\n".join(found) or "All links, anchors and pictures are there.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
