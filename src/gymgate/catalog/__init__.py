"""What an installed nemo-gym offers, read from its files; nothing of it is imported or run."""

from gymgate.catalog.catalog import Catalog
from gymgate.catalog.model import DataFile, Dataset, EnvConfig, Environment
from gymgate.catalog.needs import Need, NeedKind
from gymgate.catalog.resolve import ServerInstance

__all__ = [
    "Catalog",
    "DataFile",
    "Dataset",
    "EnvConfig",
    "Environment",
    "Need",
    "NeedKind",
    "ServerInstance",
]
