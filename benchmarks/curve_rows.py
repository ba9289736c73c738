"""Sets of rows for the learning curve: what is asked, and which packaged environment scores it.

The questions come from a generator with a seed. Training rows and held-out rows share no prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.core.config import EnvironmentConfig
from gymgate.gym.preparation import PrepareConfig, prepare_data

Row = dict[str, Any]


@dataclass(frozen=True)
class RowSet:
    """One task for the model."""

    environment: str
    make: Callable[[int, Path], list[Row]]
    """Returns a number of rows, perhaps fewer; the path is a directory for its files."""
    max_tokens: int
    answer_field: str


def make_rows(name: str, train: int, held_out: int, directory: Path) -> tuple[Path, Path]:
    """Write `train.jsonl` and `held_out.jsonl`. No prompt is twice in them, and no word of word_forms is in both."""
    made = SETS[name].make(2 * (train + held_out), directory)
    distinct = list({prompt(row): row for row in made}.values())
    held = distinct[:held_out]
    seen = {subject(row) for row in held}
    trained = [row for row in distinct[held_out:] if subject(row) not in seen][:train]
    if len(held) < held_out or len(trained) < train:
        raise ValueError(f"{name} has {len(distinct)} distinct rows, too few for {train} + {held_out}")
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, rows in zip(paths, (trained, held), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def prompt(row: Row) -> str:
    """Return the messages of a row as text."""
    return json.dumps(row["responses_create_params"]["input"])


def subject(row: Row) -> str:
    """Return what must not be in both files: the word that is asked about, else the prompt."""
    return str(row["metadata"].get("word") or prompt(row))


def generated(task: str, **settings: int) -> Callable[[int, Path], list[Row]]:
    """Rows of reasoning_gym's own generator, made by NeMo Gym's script."""

    def make(number: int, directory: Path) -> list[Row]:
        arguments = ("--task", task, "--size", str(number), "--seed", "1", "--config", json.dumps(settings))
        prepare_data(
            PrepareConfig(
                environment=EnvironmentConfig(name="reasoning_gym"),
                splits=("train",),
                script_arguments=arguments,
            ),
            directory / "generated",
        )
        return [
            json.loads(line) for line in (directory / "generated" / "train.jsonl").read_text().splitlines()
        ]

    return make


def word_forms(number: int, directory: Path) -> list[Row]:
    """Forms of words, with the past tense of one verb as an example; string_match compares the whole answer."""
    words = [
        *(("verb", word) for word in VERBS.split()),
        *(("noun", word) for word in NOUNS.split()),
        *(("adjective", word) for word in ADJECTIVES.split()),
    ]
    random.Random(1).shuffle(words)
    rows = [_row(word, form, ending) for kind, word in words for form, ending in FORMS[kind].items()]
    return rows[:number]


def _row(word: str, form: str, ending: str) -> Row:
    messages = [
        {"role": "system", "content": "Answer with one word."},
        {"role": "user", "content": "What is the past tense of talk?"},
        {"role": "assistant", "content": "talked"},
        {"role": "user", "content": f"What is the {form} of {word}?"},
    ]
    return {
        "responses_create_params": {"input": messages},
        "expected_answer": (word.removesuffix("e") if ending != "s" else word) + ending,
        "extraction_mode": "full_response",
        "metadata": {"word": word},
        "agent_ref": {"type": "responses_api_agents", "name": "string_match_simple_agent"},
    }


FORMS = {
    "verb": {"past tense": "ed", "-ing form": "ing"},
    "noun": {"plural": "s"},
    "adjective": {"comparative": "er"},
}
VERBS = """
accept add allow answer appear arrive ask attack attend bake bark believe boil borrow bounce burn call care change chase check
clean climb close collect color compare complain cook count cover crash create cross dance decide defend deliver destroy drown
earn enjoy enter escape explain fail fill finish float follow fold glue guess hate help hope hunt improve invite join joke jump
kick kill knock land last laugh learn like listen live lock look love measure melt mix move need notice obey offer open order
pack paint pass pause perform pick plant play point pour prepare press pretend print protect provide pull push rain reach
receive remain remember repair rescue rest return roll sail save scream search seem serve share shout sign smile smoke
sneeze sound start stay suffer surprise taste thank touch train trust turn use visit wait walk wash watch whisper wish work yell
"""
NOUNS = """
animal apple arm artist ball banana bank bed bell bird boat book bottle bowl boy bridge brother building cake camera car card
carrot cat chair cloud coat color computer cook cow cup curtain desk doctor dog door dream driver duck ear egg engine eye farm
father farmer finger flag flower forest friend garden gate girl goat hand hat hill horse hospital hotel house idea island key
king kitchen lake lamp lawyer letter lion machine map market mirror monkey moon mother mountain mouth nail name neck nose
number ocean office onion orange painter pen pencil picture pig pilot pipe planet plate queen rabbit ring river road rock roof
room school shirt shoe shop singer sister snake song spoon star stone storm street student table teacher tiger town train tree
truck wall wheel window
"""
ADJECTIVES = """
bright brave calm cheap clean clear close cold cool cruel dark deep fair fast fine firm fresh full great hard high kind large
late light long loud low mild narrow near neat new nice old poor proud pure quick quiet rare rich rough safe sharp short sick
simple slow small smart smooth soft strange strong sweet tall thick tight warm weak wide wild wise young
"""

SETS = {
    "chain_sum": RowSet(
        "reasoning_gym",
        generated("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2),
        16,
        "answer",
    ),
    "needle_haystack": RowSet(
        "reasoning_gym",
        generated("needle_haystack", min_num_statements=2, max_num_statements=3),
        12,
        "answer",
    ),
    "word_forms": RowSet("string_match", word_forms, 8, "expected_answer"),
}
