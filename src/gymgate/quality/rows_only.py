"""What an environment's rows show without a server: the record's section `data`, alone."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gymgate.gym.catalog import Catalog, DataFile
from gymgate.gym.catalog.entries import kind_of_file
from gymgate.quality.model import CheckRequest, CheckResult
from gymgate.quality.record import row_quality
from gymgate.quality.record.storage import shipped_record
from gymgate.quality.recordings import with_own_data


def read_rows(
    request: CheckRequest, catalog: Catalog, record: CheckResult | None = None, files: Sequence[Path] = ()
) -> CheckResult:
    """Return the environment's record with the section `data` made anew.

    The record is `record`, else the one that ships with gymgate, else one that says that nothing was run. `files` are
    read instead of the packaged rows. Raises `ConfigError` if there is no environment or config of that name.
    """
    began = time.monotonic()
    environment = with_own_data(catalog.find(request.name, request.environment.config))
    if files:
        stems = Counter(path.stem for path in files)
        names = [path.stem if stems[path.stem] == 1 else str(path.with_suffix("")) for path in files]
        read = tuple(
            DataFile(name, path, kind_of_file(path)) for name, path in zip(names, files, strict=True)
        )
        environment = dataclasses.replace(environment, data=read)
    section = row_quality.of_environment(environment, request.environment.config)
    base = record or shipped_record(environment.kind, environment.name, catalog.version)
    if base is not None:
        return base.model_copy(update={"data": section})
    about = {"environment": environment.name, "kind": environment.kind}
    return request.result(
        began, **about, verdict="incomplete", detail="only its rows were read", data=section
    )
