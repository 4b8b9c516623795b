"""All pages can be read as files, and the check of that finds what cannot."""

import pathlib

import pytest

from .links_in_files import pages, problems, slug


pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda x: str(x.relative_to(ROOT)))
def test_pages_can_be_read_as_files(page):
    assert problems(page) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    (
        ("[b](other.md#a-heading)", None),
        ("[b](#here)\n\n## Here", None),
        ("[b](https://example.org/none)", None),
        ("`[b](none.md)` and\n\n```python\nx[a](none)\n```", None),
        ("[b](none.md)", "no such file: none.md"),
        ("[b](other.md#none)", "no such anchor: other.md#none"),
        ("![](other.md)", "no alt text: other.md"),
        ("See [`eqxbatch.Sum`][].", "reference: ][]"),
        ("See [sums][eqxbatch.Sum].", "reference: ][eqxbatch.Sum]"),
        ('--8<-- "table.md"', "include: --8<--"),
        ("::: eqxbatch.Sum", "directive: ::: e"),
        ("??? note", "directive: ???"),
        ("## Here { #there }", "attribute: { #there }"),
        ("---\nsearch: 2\n---\n", "front matter: ---"),
    ),
)
def test_what_a_viewer_of_files_shows_wrongly(text, problem, tmp_path):
    (tmp_path / "other.md").write_text("# A `heading`\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    assert problems(page) == ([] if problem is None else [problem])


def test_anchors_are_those_of_github():
    assert slug("From `jax.lax.map(..., batch_size=)`") == "from-jaxlaxmap-batch_size"
    assert slug("Why, and [where](a.md)?") == "why-and-where"
