"""What the pages about environments are made of.

python docs/records.py DIR     # put the records of `gymgate check --record DIR` into the package; others there stay
python docs/records.py         # put the first prompt of every measured environment into docs/prompts.json
python docs/generate.py        # write the pages

The difficulty in the shipped records is that of one small model, on the CPU:

./dev engine python -m benchmarks.engine.server --port 8000
gymgate check ENV... --record DIR --section policy -b http://127.0.0.1:8000/v1 -n 5 -r 2 \
    --sampling temperature=1 --sampling max_tokens=256 --timeout 60
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from environment_pages import PROMPTS

import gymgate.quality.record.storage as files
from gymgate.core.config import RuntimeConfig
from gymgate.gateway.replay.conversation import blocks_of, items_of
from gymgate.gym.runtime import open_catalog
from gymgate.quality import CheckResult
from gymgate.quality.recordings import packaged_rows

SHOWN = 1500
"""Characters of a prompt."""
WITHHELD = ("gpqa_diamond",)
"""Environments whose authors ask that their questions are not put online."""
_LOCAL_PATH = re.compile(
    r"(?<![\w.:/-])/(?:root|home|tmp|Users|var|opt|work)/[\w./+@-]*?([\w.+@-]+)(?=[^\w./+@-]|$)"
)
_OWN_PORT = re.compile(r"(?<=http://127\.0\.0\.1):\d+")
_INSTALLED_PATH = re.compile(r"[^ '\"(=`]*site-packages/")


def pack(directory: Path) -> None:
    """Put records into the package, without paths and ports of this machine."""
    found = {record.name: record for record in files.shipped_records()}
    for path in sorted(directory.rglob("*.json")):
        record = files.load_record(path)
        assert record is not None
        if record.verdict == "failed":  # something of the machine that measured it
            print(f"left out: {record.name}: {record.detail[:200]}")
            continue
        found[record.name] = CheckResult.model_validate(portable(whole(record).model_dump()))
    target = Path(files.__file__).parent / files.SHIPPED
    target.write_bytes(files.pack_records(found.values()))
    print(f"{len(found)} records, {target.stat().st_size / 1000:.0f} kB in {target.name}")


def whole(record: CheckResult) -> CheckResult:
    """The record without a model's rewards if some rollouts have none: those that take long are not the easy ones."""
    policy = record.policy
    if policy is None or policy.scored == (count := policy.rows * policy.repeats):
        return record
    why = policy.missing.get("pass_at_1") or f"{policy.scored} of {count} rollouts gave a reward"
    reason = f"{policy.policy}: {why}"
    return record.model_copy(update={"policy": None, "missing": {**record.missing, "policy": reason}})


def portable(value: Any, key: str = "") -> Any:
    """A record's value without gymgate's own ports, which differ from run to run. Paths of this machine keep their last
    part, or what lies in the installed release. Texts are on one line, but for answers, which are as they were given."""
    if isinstance(value, str):
        text = value if key == "answer" else " ".join(value.split())
        text = _INSTALLED_PATH.sub("", text.replace("file:///", "/"))
        return _LOCAL_PATH.sub(r".../\1", _OWN_PORT.sub("", text))
    if isinstance(value, dict):
        return {key: portable(each, key) for key, each in value.items()}
    return [portable(each) for each in value] if isinstance(value, list | tuple) else value


def write_prompts() -> None:
    """Write the first prompts. Installs the release where it is missing."""
    found = {}
    for record in filter(lambda record: record.measured, files.shipped_records()):
        environment = open_catalog(RuntimeConfig(version=record.nemo_gym)).find(
            f"{record.kind}/{record.environment}"
        )
        config = environment.config(record.config) if record.config else environment.config()
        rows = packaged_rows(environment, config=config)
        if environment.domain == "safety" or environment.name in WITHHELD or not rows:
            continue
        if (prompt := prompt_of(rows[0])) and "canary" not in prompt.lower():
            found[f"{record.kind}/{record.environment}"] = prompt
    PROMPTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(found)} prompts in {PROMPTS.name}")


def prompt_of(row: dict[str, Any]) -> str:
    """Who says what at the start of a row's conversation, cut to `SHOWN` characters."""
    parts = []
    for block in blocks_of(items_of(row["responses_create_params"])):
        said = "\n".join(
            [*block.texts, *block.media, *(f"{name}({arguments})" for name, arguments in block.calls)]
        )
        outputs = [output for _, output in block.outputs]
        parts.append("\n".join([f"{block.role}:", *filter(None, [said, *outputs])]))
    whole = "\n\n".join(parts).strip()
    clean = "".join(each for each in whole if each.isprintable() or each == "\n").replace("````", "```")
    return clean if len(clean) <= SHOWN else f"{clean[:SHOWN]} ... ({len(clean):,} characters)"


if __name__ == "__main__":
    pack(Path(sys.argv[1])) if sys.argv[1:] else write_prompts()
