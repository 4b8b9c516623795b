"""The crawler of the built site finds what dangles, and nothing else."""

import pytest

from .site_links import problems


pytestmark = pytest.mark.quick

GOOD = '<a href="../b/#there">b</a><a href="#here">c</a><h1 id="here">A</h1>'


@pytest.fixture
def site(tmp_path):
    """Two pages that link to each other, with a picture."""
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "index.html").write_text(GOOD)
    text = '<h2 id="there">B</h2><a href="/a/index.html#here">a</a>'
    outside = '<a href="https://example.org/nothing#here">out</a>'
    picture = '<img src="../a%20b.svg" alt="A picture">'
    (tmp_path / "b" / "index.html").write_text(text + outside + picture)
    (tmp_path / "a b.svg").write_text("<svg/>")
    return tmp_path


def test_nothing_dangles(site):
    assert problems(site) == []


@pytest.mark.parametrize(
    ("html", "problem"),
    (
        ('<a href="../c/">c</a>', "a/index.html:1: no such file: ../c/"),
        ('<a href="../b/#her">b</a>', "a/index.html:1: no such anchor: ../b/#her"),
        ('<a href="#nowhere">b</a>', "a/index.html:1: no such anchor: #nowhere"),
        ('<a href="../../x">x</a>', "a/index.html:1: leads out of the site: ../../x"),
        ('<img src="c.png" alt="C">', "a/index.html:1: no such file: c.png"),
        ('<img src="../a b.svg">', "a/index.html:1: no alt text: ../a b.svg"),
        ('<img src="../a b.svg" alt="">', "a/index.html:1: no alt text: ../a b.svg"),
        ('<script src="c.js"></script>', "a/index.html:1: no such file: c.js"),
        (
            '<script src="https://example.org/c.js"></script>',
            "a/index.html:1: loaded from another site: https://example.org/c.js",
        ),
        (
            '<link rel="stylesheet" href="//example.org/c.css">',
            "a/index.html:1: loaded from another site: //example.org/c.css",
        ),
    ),
)
def test_what_dangles(site, html, problem):
    (site / "a" / "index.html").write_text(GOOD + html)
    assert problems(site) == [problem]


def test_no_site(tmp_path):
    assert problems(tmp_path) == [f"no pages in {tmp_path}"]
