# SPDX-License-Identifier: Apache-2.0
"""Tables as text and as HTML, from one description of columns and rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple, Self

from shardax.extend import align_columns


@dataclass(frozen=True, kw_only=True)
class Column:
    """What a column of a table shows.

    Attributes:
        head: Its title.
        unit: Unit of its figures, a second line of the title.
        right: Whether its cells are aligned on the right, as figures are.
        label: What its figures are worth; pages have it beside the unit.
        meaning: A sentence that pages show under the pointer.
    """

    head: str
    unit: str = ""
    right: bool = False
    label: str = ""
    meaning: str = ""


class TableCell(NamedTuple):
    """One cell: its text, and what pages have of it beside that."""

    text: str
    html: str | None = None  # in place of the text
    sort_key: float | str | None = None  # a row without it is sorted last
    kind: str = ""  # class of the element, for the page's style


@dataclass(frozen=True)
class DisplayTable:
    """Columns, and the cells of each row."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]

    @classmethod
    def of(cls, columns: Iterable[Column], rows: Iterable[Iterable[str | TableCell]]) -> Self:
        """Returns the table of rows whose cells may be plain texts."""
        cells = [
            tuple(cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row)
            for row in rows
        ]
        return cls(tuple(columns), tuple(cells))

    def texts(self) -> list[tuple[str, ...]]:
        """Returns the titles, the units if there are any, and the texts of each row."""
        lines = [tuple(column.head for column in self.columns)]
        if any(column.unit for column in self.columns):
            lines.append(tuple(column.unit for column in self.columns))

        return lines + [tuple(cell.text for cell in row) for row in self.rows]

    def lines(self) -> list[str]:
        """Returns the lines of the table as text."""
        right = [index for index, column in enumerate(self.columns) if column.right]
        return align_columns(self.texts(), right)

    def html(self, kind: str = "", *, label: str = "Table", sortable: bool = False) -> str:
        """Returns the table as HTML that scrolls where it is wider than its page.

        Args:
            kind: Class of the ``<table>`` element.
            label: Name of the table for screen readers.
            sortable: Whether titles are buttons, for a page whose script sorts the rows. Then the
                first cell of a row is its title too.

        Returns:
            The text of an element.
        """
        heads = "".join(_head(column, sortable) for column in self.columns)
        body = "".join(f"<tr>{self._html_of_row(row, sortable)}</tr>" for row in self.rows)

        # The style stands in the elements, for notebooks have no style of this package.
        return (
            '<div class="wide" style="overflow-x:auto;font-variant-numeric:tabular-nums" '
            f'tabindex="0" role="region" aria-label="{escape(label)}">'
            f"<table{_attribute('class', kind)}>"
            f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _html_of_row(self, row: Sequence[TableCell], sortable: bool) -> str:
        elements: list[str] = []
        for index, (cell, column) in enumerate(zip(row, self.columns, strict=True)):
            content = escape(cell.text) if cell.html is None else cell.html
            attributes = _attribute("class", cell.kind) + _alignment(column)
            if sortable:
                attributes += f' data-value="{escape(_sort_text(cell.sort_key))}"'

            if sortable and index == 0:
                elements.append(f'<th scope="row"{attributes}>{content}</th>')
            else:
                elements.append(f"<td{attributes}>{content}</td>")
        return "".join(elements)


def facts_html(facts: Iterable[tuple[str, str]], kind: str) -> str:
    """Returns the HTML of a table of names and texts, without titles."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts
    )
    return f'<table class="{kind}">{rows}</table>'


def _head(column: Column, sortable: bool) -> str:
    """Returns the element of a title, as a button if it sorts."""
    title = escape(column.head)
    below = escape(", ".join(filter(None, (column.unit, column.label))))
    attributes = _alignment(column) + _attribute("title", column.meaning)
    if not sortable:
        return f"<th{attributes}>{title}{f'<small>{below}</small>' if below else ''}</th>"

    # Every title has the second line, so that they stand at one height.
    order = "number" if column.right else "text"
    return (
        f'<th scope="col" data-kind="{order}"{attributes}><button type="button">{title}</button>'
        f"<small>{below or '&nbsp;'}</small></th>"
    )


def _alignment(column: Column) -> str:
    return ' style="text-align:right"' if column.right else ""


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escape(value)}"' if value else ""


def _sort_text(key: float | str | None) -> str:
    if key is None:
        return ""
    return key if isinstance(key, str) else f"{key:.10g}"
