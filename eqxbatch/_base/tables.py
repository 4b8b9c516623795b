"""Tables of what users look at: as text, and as HTML in notebooks."""

import abc
import dataclasses
import html
from collections.abc import Sequence

from .trees import safe_zip


# The most lines that the last line of a cell shows; `print` shows all.
_MOST_LINES = 20


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text.

    - `rows`: the heading, the other rows, and in the end `num_sums` rows of sums.
    - `num_texts`: the number of columns of text, before those of numbers.
    - `notes`: lines below the table.
    """

    rows: Sequence[Sequence[str]]
    num_texts: int
    num_sums: int = 0
    notes: Sequence[str] = ()

    def text(self) -> str:
        """All lines. With sums, there are rules below the heading and above them."""
        widths = [max(map(len, column)) for column in safe_zip(*self.rows)]
        lines = []
        for row in self.rows:
            # Numbers end below each other, and texts begin so.
            cells = [*map(str.rjust, row, widths)]
            texts = [*map(str.ljust, row[: self.num_texts], widths)]
            lines.append("  ".join([*texts, *cells[self.num_texts :]]))
        if self.num_sums:
            rule = "-" * len(lines[0])
            sums = lines[-self.num_sums :]
            lines = [lines[0], rule, *lines[1 : -self.num_sums], rule, *sums]
        return "\n".join(line.rstrip() for line in [*lines, *self.notes])

    def html(self) -> str:
        """The same as HTML, in which notebooks scroll."""
        heading, *rows = self.rows
        lines = ["<table>", f"<thead>{self._row(heading, 'th')}</thead>", "<tbody>"]
        lines += [self._row(row, "td") for row in rows]
        lines += ["</tbody>", "</table>"]
        lines += [f"<p>{html.escape(note)}</p>" for note in self.notes if note]
        return "\n".join(lines)

    def _row(self, row: Sequence[str], tag: str) -> str:
        sides = ["left"] * self.num_texts + ["right"] * (len(row) - self.num_texts)
        cells = (
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for cell, side in safe_zip(row, sides)
        )
        return f"<tr>{''.join(cells)}</tr>"

    def short(self) -> "Table":
        """The table with fewer rows and notes, if it has too many lines."""
        num_lines = self.text().count("\n") + 1
        if num_lines <= _MOST_LINES:
            return self
        # One more line says how much is left out, and two are rules.
        first = 1 + self.num_sums
        room = _MOST_LINES - first - (2 if self.num_sums else 0) - 1
        end = len(self.rows) - self.num_sums
        notes = self.notes[: max(1, room - (end - 1))]
        rows = self.rows[1:end][: room - len(notes)]
        num_left = end - 1 - len(rows) + len(self.notes) - len(notes)
        left = f"{num_left} more lines: `print` shows all of them."
        shown = [self.rows[0], *rows, *self.rows[end:]]
        return dataclasses.replace(self, rows=shown, notes=[*notes, left])


def shape_text(shape: Sequence[int]) -> str:
    """A shape in a table, such as `3x4`."""
    return "x".join(map(str, shape)) or "()"


class AbstractTabular(abc.ABC):
    """What `print` shows as a table, and a notebook, too, with the first rows of it."""

    @property
    @abc.abstractmethod
    def table(self) -> Table:
        """What is shown."""

    def __str__(self) -> str:
        return self.table.text()

    def __repr__(self) -> str:
        return self.table.short().text()

    def _repr_html_(self) -> str:
        return self.table.short().html()
