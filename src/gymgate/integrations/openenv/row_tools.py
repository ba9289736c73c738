"""Tools of a row, as OpenEnv describes tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openenv.core.env_server.mcp_types import Tool


def tools_of(row: Mapping[str, Any]) -> list[Tool]:
    """Return the functions that a row offers; tools of other types, which a provider would run, are left out."""
    offered = row["responses_create_params"].get("tools") or []
    return [
        Tool(
            name=tool["name"],
            description=tool.get("description") or "",
            input_schema=tool.get("parameters") or {},
        )
        for tool in offered
        if tool.get("type") == "function"
    ]
