"""Rows of work: read by byte offset, validated, kept verbatim, blended."""

from __future__ import annotations

from gymgate.dataset.mixture import blend
from gymgate.dataset.row import Row, make_row, row_key
from gymgate.dataset.rowfile import RowFile
from gymgate.dataset.sources import Rows, RowSource, open_rows, open_sources

__all__ = ["Row", "RowFile", "RowSource", "Rows", "blend", "make_row", "open_rows", "open_sources", "row_key"]
