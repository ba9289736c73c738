"""What an installed nemo-gym offers, read from its files; nothing of it is imported or run."""

from __future__ import annotations

from gymgate.catalog.catalog import Catalog
from gymgate.catalog.model import (
    AgentInstance,
    DataFile,
    Dataset,
    EnvConfig,
    Environment,
    Need,
    NeedKind,
    ServerInstance,
)

__all__ = [
    "AgentInstance",
    "Catalog",
    "DataFile",
    "Dataset",
    "EnvConfig",
    "Environment",
    "Need",
    "NeedKind",
    "ServerInstance",
]
