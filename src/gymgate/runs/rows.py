"""The input rows of rollouts, read again from their files."""

from __future__ import annotations

from typing import Any

from gymgate.core.errors import DataError
from gymgate.gym.row_sources import Rows, open_rows


class RowReader:
    """Reads rows by file and key. Of each file, the positions of its rows are kept."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[Rows, dict[str, int]]] = {}

    def read(self, source: str, key: str) -> dict[str, Any]:
        """The row with this key. Raises `DataError` if its file has changed or is gone."""
        if source not in self._opened:
            rows = open_rows(source, environment=None)
            self._opened[source] = rows, _positions(rows)
        rows, positions = self._opened[source]
        if key not in positions:
            raise DataError(
                f"{source} has changed: row {key} is not there; put the former file back", path=source
            )
        return rows[positions[key]].data


def _positions(rows: Rows) -> dict[str, int]:
    found: dict[str, int] = {}
    for position in range(len(rows)):
        try:
            found[rows[position].key] = position
        except DataError as error:
            if error.line is None:  # the file itself cannot be read
                raise
    return found
