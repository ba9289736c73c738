"""The file of a source: there already, made by the script that the config names, or downloaded."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from ..names import gym_symbol
from .directories import Directories, sha256_of
from .events import EndedError, Events, refusal
from .scripts import candidates, has_option, script_origin
from .sources import RawSource

Origin = dict[str, Any]


class Fetcher:
    """Gets files into the workspace, each once."""

    def __init__(self, order: dict[str, Any], directories: Directories, events: Events) -> None:
        self.order = order
        self.directories = directories
        self.events = events

    def fetch(self, source: RawSource) -> tuple[Path, Origin]:
        """A source's file and where it comes from; `changed` means that it differs from the one fetched earlier."""
        declared = str(source.dataset["jsonl_fpath"])
        if source.origin is not None:
            return Path(declared), source.origin
        if (there := self.directories.find(declared, in_workspace=False)) is not None:
            return there, {"kind": "packaged", "sha256": sha256_of(there)}
        recipe, note = self._recipe(source), FetchNote(self.directories.workspace, declared)
        before = note.read()
        if before is not None and not self.order["refresh"] and note.holds(recipe):
            self.events.step(f"{source.name}: fetched earlier")
            return Path(before["path"]), before["origin"]
        path, origin = self._get(source, self.directories.workspace / declared)
        origin["sha256"] = sha256_of(path)
        note.write(path.absolute(), recipe, origin)
        changed = before is not None and before["origin"]["sha256"] != origin["sha256"]
        return path, origin | {"changed": changed}

    def _recipe(self, source: RawSource) -> dict[str, Any]:
        """Return everything that decides a source's content, except the state of the hub."""
        name = source.dataset.get("prepare_script") or (None if source.huggingface else self._beside(source))
        script = self.directories.find(str(name), in_workspace=False) if name else None
        return {
            "huggingface": source.huggingface,
            "script": sha256_of(script) if script else None,
            "arguments": self.order["arguments"],
        }

    def _beside(self, source: RawSource) -> str | None:
        """Return the `prepare.py` of the packaged environment in whose data directory a source's file belongs."""
        name = Path(source.dataset["jsonl_fpath"]).parent.parent / "prepare.py"
        return str(name) if (self.directories.site / name).is_file() else None

    def _get(self, source: RawSource, target: Path) -> tuple[Path, Origin]:
        if script := source.dataset.get("prepare_script"):
            return self._call(source, str(script))
        if source.huggingface:
            return self._download(source, target)
        if beside := self._beside(source):
            return self._execute(source, beside, target)
        registry = source.dataset.get("gitlab_identifier") or source.dataset.get("source") or {}
        if name := registry.get("dataset_name"):
            raise refusal(
                "NeedMissingError",
                f"dataset {source.name!r} is only in NVIDIA's own registry (as {name}), which gymgate does not reach; "
                f"if you have the file, give it with --input FILE",
            )
        names = [path.name for path in candidates(self.order)]
        others = f" (others: {', '.join(names[1:])})" if names[1:] else ""
        advice = (
            f"a script may make them: --script {names[0]} -- ARGUMENTS" if names else "no script makes them"
        )
        raise refusal(
            "ConfigError",
            f"its config does not say where the rows of {source.name!r} come from; {advice}{others}; if you have the file, "
            "give it with --input FILE",
        )

    def _download(self, source: RawSource, target: Path) -> tuple[Path, Origin]:
        """Download a file of a dataset repository, or one of its splits, with NeMo Gym's own function."""
        Order: Any = gym_symbol("DownloadJsonlDatasetHuggingFaceConfig")
        repository, artifact = source.huggingface["repo_id"], source.huggingface.get("artifact_fpath")
        self.events.step(f"{source.name}: downloading {artifact or 'split ' + source.type} of {repository}")
        unfinished = target.with_name(f".{target.name}.part")
        selection = {"artifact_fpath": artifact} if artifact else {"split": source.type}
        settings = {"repo_id": repository, "output_fpath": str(unfinished), **selection}
        gym_symbol("download_hf_dataset_as_jsonl")(Order.model_validate(settings))
        unfinished.replace(target)
        origin = {"kind": "huggingface", "repository": repository, **selection, "commit": _commit(repository)}
        return target, origin

    def _call(self, source: RawSource, script: str) -> tuple[Path, Origin]:
        """Call `prepare()` of the script that a dataset names, as `gym eval prepare` does."""
        self.events.step(f"{source.name}: running {script}")
        root = self.directories.script_root(script)
        local = _local_packages(source.dataset.get("prepare_dependencies") or [], root)
        with self.directories.importing_from(root, [*local, (root / script).parent]):
            module = importlib.import_module(".".join(Path(script).with_suffix("").parts))
            if not hasattr(module, "prepare"):
                raise refusal("ConfigError", f"{script} has no function prepare()")
            result = module.prepare(**self.order["arguments"])
            path = Path(result or source.dataset["jsonl_fpath"]).absolute()
        return _check_output(root, script, path)

    def _execute(self, source: RawSource, script: str, target: Path) -> tuple[Path, Origin]:
        """Run the `prepare.py` of the packaged environment in whose data directory the file belongs."""
        self.events.step(f"{source.name}: running {script}")
        root = self.directories.script_root(script)
        target.parent.mkdir(parents=True, exist_ok=True)
        options = {"--split": source.type, "--output": str(target)}
        taken = [option for option in options if has_option(root / script, option)]
        self.directories.execute(root / script, [word for flag in taken for word in (flag, options[flag])])
        return _check_output(root, script, target)


class FetchNote:
    """A note in the workspace about one fetched file: `path`, `recipe` and `origin`."""

    def __init__(self, workspace: Path, declared: str) -> None:
        self._path = workspace / ".prepared" / f"{hashlib.sha256(declared.encode()).hexdigest()[:16]}.json"

    def read(self) -> dict[str, Any] | None:
        try:
            value = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def holds(self, recipe: dict[str, Any]) -> bool:
        """Whether the file was made by this recipe and has not changed."""
        note = self.read()
        if note is None or note["recipe"] != json.loads(json.dumps(recipe)):
            return False
        file = Path(note["path"])
        return file.is_file() and sha256_of(file) == note["origin"]["sha256"]

    def write(self, path: Path, recipe: dict[str, Any], origin: Origin) -> None:
        self._path.parent.mkdir(exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps({"path": str(path), "recipe": recipe, "origin": origin}))
        unfinished.replace(self._path)


def _check_output(root: Path, script: str, path: Path) -> tuple[Path, Origin]:
    if not path.is_file():
        raise refusal("DataError", f"{script} ended without writing {path.name}")
    return path, script_origin(root / script, script)


def _local_packages(declared: list[str], root: Path) -> list[Path]:
    """Directories of a script's own packages (`-e PATH`). Ends with `lacks` if others are not installed."""
    words = iter(declared)
    local, missing = [], []
    for word in words:
        if word in ("-e", "--editable"):
            path = root / next(words, "")
            local += [path / "src", path]
        elif not _is_installed(word):
            missing.append(word)
    if missing:
        raise EndedError("lacks", requirements=missing)
    return local


def _is_installed(requirement: str) -> bool:
    try:
        importlib.metadata.distribution(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _commit(repository: str) -> str | None:
    """The commit of a dataset repository's main branch that was seen last."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    reference = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}" / "refs" / "main"
    return reference.read_text().strip() if reference.is_file() else None
