"""A declared dataset's file: there already, made by the script that its config names, or downloaded."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path
from typing import Any

from .declared import Source
from .places import Places
from .scripts import candidates, takes
from .stamps import Stamp, digest_of
from .told import LacksError, RefusedError, Told

Origin = dict[str, Any]


class Fetcher:
    """Gets files into the workspace, each once."""

    def __init__(self, order: dict[str, Any], places: Places, told: Told) -> None:
        self.order = order
        self.places = places
        self.told = told

    def fetched(self, source: Source) -> tuple[Path, Origin]:
        """A source's file as it came, and where it is from; `changed` says that it differs from an earlier one."""
        declared = str(source.dataset["jsonl_fpath"])
        if source.made is not None:
            return Path(declared), source.made
        if (there := self.places.located(declared, made=False)) is not None:
            return there, {"kind": "packaged", "sha256": digest_of(there)}
        recipe, stamp = self._recipe(source), Stamp(self.places.workspace, declared)
        if not self.order["refresh"] and (noted := stamp.valid(recipe)) is not None:
            self.told.step(f"{source.name}: fetched earlier")
            return Path(noted["path"]), noted["origin"]
        before = stamp.read()
        path, origin = self._fetch(source, self.places.workspace / declared)
        origin["sha256"] = digest_of(path)
        stamp.write(path.absolute(), recipe, origin)
        return path, origin | {
            "changed": before is not None and before["origin"]["sha256"] != origin["sha256"]
        }

    def _recipe(self, source: Source) -> dict[str, Any]:
        """What decides a source's content, the state of the hub apart."""
        script = source.dataset.get("prepare_script")
        file = self.places.located(str(script)) if script else None
        return {
            "huggingface": source.huggingface,
            "script": digest_of(file) if file else None,
            "arguments": self.order["arguments"],
        }

    def _fetch(self, source: Source, target: Path) -> tuple[Path, Origin]:
        if script := source.dataset.get("prepare_script"):
            return self._by_function(source, str(script))
        if source.huggingface:
            return self._from_hub(source, target)
        if (script := self._beside(target)) is not None:
            return self._by_program(source, script, target)
        registry = source.dataset.get("gitlab_identifier") or source.dataset.get("source") or {}
        if name := registry.get("dataset_name"):
            raise RefusedError(
                "NeedMissingError",
                f"dataset {source.name!r} is only in NVIDIA's own registry (as {name}), which gymgate does not reach; "
                f"with the file at hand: --input FILE",
            )
        names = [path.name for path in candidates(self.order)]
        made = (
            f"a script of it may make them: --script {names[0]} -- ARGUMENTS"
            if names
            else "no script makes them"
        )
        others = f" (others: {', '.join(names[1:])})" if names[1:] else ""
        raise RefusedError(
            "ConfigError",
            f"its config does not say where the rows of {source.name!r} come from; {made}{others}; with a file of them "
            f"at hand: --input FILE",
        )

    def _from_hub(self, source: Source, target: Path) -> tuple[Path, Origin]:
        """Download a file of a dataset repository, or one of its splits, with NeMo Gym's own function."""
        types: Any = importlib.import_module("nemo_gym.config_types")
        hub: Any = importlib.import_module("nemo_gym.hf_utils")
        repository, artifact = source.huggingface["repo_id"], source.huggingface.get("artifact_fpath")
        self.told.step(f"{source.name}: downloading {artifact or 'split ' + source.type} of {repository}")
        unfinished = target.with_name(f".{target.name}.part")
        wanted = {"artifact_fpath": artifact} if artifact else {"split": source.type}
        hub.download_hf_dataset_as_jsonl(
            types.DownloadJsonlDatasetHuggingFaceConfig.model_validate(
                {"repo_id": repository, "output_fpath": str(unfinished), **wanted}
            )
        )
        unfinished.replace(target)
        return target, {
            "kind": "huggingface",
            "repository": repository,
            **wanted,
            "commit": commit(repository),
        }

    def _by_function(self, source: Source, script: str) -> tuple[Path, Origin]:
        """Call `prepare()` of the script that a dataset names, as `gym eval prepare` does."""
        self.told.step(f"{source.name}: running {script}")
        root = self.places.script_root(script)
        local = _local_packages(source.dataset.get("prepare_dependencies") or [], root)
        with self.places.importing_from(root, [*local, (root / script).parent]):
            module = importlib.import_module(".".join(Path(script).with_suffix("").parts))
            if not hasattr(module, "prepare"):
                raise RefusedError("ConfigError", f"{script} has no function prepare()")
            made = module.prepare(**self.order["arguments"])
            path = Path(made or source.dataset["jsonl_fpath"]).absolute()
        return path, self._by(root, script, path)

    def _beside(self, target: Path) -> str | None:
        """`prepare.py` of the packaged environment in whose data directory a dataset without a source belongs."""
        script = target.parent.parent.relative_to(self.places.workspace) / "prepare.py"
        return str(script) if (self.places.site / script).is_file() else None

    def _by_program(self, source: Source, script: str, target: Path) -> tuple[Path, Origin]:
        self.told.step(f"{source.name}: running {script}")
        root = self.places.script_root(script)
        target.parent.mkdir(parents=True, exist_ok=True)
        wanted = {"--split": source.type, "--output": str(target)}
        given = [
            word for option in wanted if takes(root / script, option) for word in (option, wanted[option])
        ]
        self.places.execute(root / script, given)
        return target, self._by(root, script, target)

    def _by(self, root: Path, script: str, made: Path) -> Origin:
        if not made.is_file():
            raise RefusedError("DataError", f"{script} ended without writing {made.name}")
        return {"kind": "script", "script": script, "script_sha256": digest_of(root / script)}


def _local_packages(declared: list[str], root: Path) -> list[Path]:
    """Directories of a script's own packages (`-e PATH`). Raises `LacksError` for other packages that are not here."""
    words = iter(declared)
    local, missing = [], []
    for word in words:
        if word in ("-e", "--editable"):
            path = root / next(words, "")
            local += [path / "src", path]
        elif not _is_installed(word):
            missing.append(word)
    if missing:
        raise LacksError(missing)
    return local


def _is_installed(requirement: str) -> bool:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def commit(repository: str) -> str | None:
    """The commit of a dataset repository's main branch that was seen last."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    reference = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}" / "refs" / "main"
    return reference.read_text().strip() if reference.is_file() else None
