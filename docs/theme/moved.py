"""A hook of MkDocs that leads from pages that are gone to those in their place."""

import pathlib
from typing import Any


# From the folder of the page in the site to the new one.
MOVED = {
    "curvature": "gauss_newton",
    "faq": "errors",
    "examples/influential_examples": "examples/influence",
    "examples/kfac_laplace": "examples/laplace",
}


def on_post_build(*, config: Any) -> None:
    for old, new in MOVED.items():
        target = "../" * len(pathlib.PurePosixPath(old).parts) + f"{new}/"
        folder = pathlib.Path(config.site_dir, old)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(
            f'<!doctype html>\n<meta http-equiv="refresh" content="0; url={target}">\n'
            f'<meta name="robots" content="noindex">\n'
            f'<a href="{target}">This page has moved.</a>\n'
        )
