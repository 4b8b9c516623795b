"""Gives the plots of examples the text above them as their description."""

import html
import re
from typing import Any


# What notebooks have for plots, and the start of a cell of text.
MISSING = re.compile(r'alt="No description has been provided for this image"')
TEXT = 'data-mime-type="text/markdown"'
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
TAGS = re.compile(r"<[^>]+>")


def on_page_content(content: str, **kwargs: Any) -> str:
    def describe(match: re.Match) -> str:
        above = content[: match.start()]
        paragraphs = PARAGRAPH.findall(above[above.rfind(TEXT) :])
        text = " ".join(TAGS.sub("", paragraphs[-1] if paragraphs else "").split())
        return f'alt="{html.escape(html.unescape(f"Plot. {text}".strip()))}"'

    return MISSING.sub(describe, content)
