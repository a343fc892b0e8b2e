"""Tables of results that show every column on narrow terminals."""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000
"""Width at which no table is limited."""

VERDICT = "verdict"
"""Header of the column that decides."""


class ResultTable(Table):
    """A table that becomes a block of lines per row if the console is too narrow for its columns.

    rich shortens or drops columns that do not fit, also numbers and the verdict.

    Args:
        columns: Headers of the columns.
        heading: How many of the first columns identify a row.
        options: Keywords of `rich.table.Table`.
    """

    def __init__(self, *columns: str, heading: int = 1, **options: Any) -> None:
        super().__init__(*columns, title_justify="left", **options)
        self.heading = heading

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or the blocks."""
        unlimited = options.update(max_width=UNLIMITED)
        for column in self.columns:
            column.width = None  # of an earlier rendering
        needed = Measurement.get(console, unlimited, self).minimum
        if needed <= options.max_width:
            self._distribute(console, unlimited, options.max_width - needed)
            yield from super().__rich_console__(console, options)
        else:
            yield from self._blocks(console)

    def _distribute(self, console: Console, options: ConsoleOptions, rest: int) -> None:
        """Give each column its longest word, and the `rest` to those with the most lines. rich would cut words."""
        sizes = []
        for column in self.columns:
            cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
            column.width, most = max(cell.minimum for cell in cells), max(cell.maximum for cell in cells)
            sizes.append(most)
        for _ in range(rest):
            lines = [most / (column.width or 1) for column, most in zip(self.columns, sizes, strict=True)]
            if max(lines) <= 1.0:
                break
            fullest = self.columns[lines.index(max(lines))]
            fullest.width = (fullest.width or 0) + 1

    def _blocks(self, console: Console) -> RenderResult:
        """Yield the title, and for each row its heading with the verdict and a line per further column."""
        if self.title:
            yield self.title if isinstance(self.title, Text) else console.render_str(self.title, style="table.title")
        names = [str(column.header) for column in self.columns]
        for cells in zip(*(map(str, column.cells) for column in self.columns), strict=True):
            row = list(zip(names, cells, strict=True))
            shown = (f"{name} {cell}" if self.heading > 1 else cell for name, cell in row[: self.heading])
            verdict = dict(row).get(VERDICT)
            yield console.render_str(", ".join(shown) + (f": {verdict}" if verdict else ""))
            fields = Table.grid(padding=(0, 2, 0, 0))
            fields.add_column(no_wrap=True, style="dim")
            fields.add_column(overflow="fold")
            for name, cell in row[self.heading :]:
                if cell and name != VERDICT:
                    fields.add_row(name, cell)
            yield Padding(fields, (0, 0, 0, 2))
