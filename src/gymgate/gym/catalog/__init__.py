"""The environments of an installed nemo-gym and their needs, read from its files. None of its code is imported or run."""

from gymgate.gym.catalog.catalog import Catalog
from gymgate.gym.catalog.entries import DataFile, Dataset, EnvConfig, Environment
from gymgate.gym.catalog.needs import Need, NeedKind
from gymgate.gym.inside.resolve import ServerInstance

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
