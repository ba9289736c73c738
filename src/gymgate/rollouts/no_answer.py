"""Whether a grader found an answer in what the policy said, as the results of packaged resources servers say it. Pure functions.

The table is from reading the servers of nemo-gym 0.7.0, and a test runs the `verify` of each over an answer in a wrong format and
one in a right format. A server is not in it where no field says so: abstention, reasoning_gym, hotpotqa_qa, simpleqa, omniscience
and frontierscience_judge take the whole text for the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from gymgate.rollouts.transcript import items_of, text_of

Values = Mapping[str, tuple[Any, ...]]
"""Fields of a result, each with the values that it has where nothing was found."""


def _each(servers: str, **fields: tuple[Any, ...]) -> dict[str, Values]:
    return dict.fromkeys(servers.split(), fields)


NOTHING_FOUND: Mapping[str, Values] = MappingProxyType(
    {
        **_each(
            "gpqa_diamond math_with_code math_with_judge mcqa string_match swerl_llm_judge",
            extracted_answer=(None,),
        ),
        **_each("imo_proofbench_judge", extracted_answer=(None, "")),
        # Its other rows have no answer extracted, whatever was said.
        **_each("ruler2", extracted_answer=(None,), eval_type=("multichoice",)),
        **_each("moldetox", status=("empty_output", "no_answer")),
        **_each("bigcodebench scicodepile", status=("empty_output", "no_code_block")),
        # With metadata the row itself could not be scored.
        **_each("code_fim code_gen evalplus", extracted_model_code=(None,), metadata=(None,)),
        **_each("bird_sql spider2_lite text_to_sql", failure_reason=("no_sql_extracted",)),
        **_each("arc_agi", extraction_successful=(False,)),
        # In the other mode, code that raises has no output either.
        **_each("nvarc", extraction_successful=(False,), agent_mode=("transductive",)),
        **_each("cvdp graphwalks", parse_failed=(True,)),
        **_each("bunsenbench_chemistry_mcq", no_answer=(True,)),
        **_each("spartqa", parsed=(False,)),
        **_each("ragtruth", parse_fail=(1,)),
        **_each("imo_gradingbench", extracted_grade=(None,)),
        **_each("math_proof_judgement", extracted_judgement=(None,)),
        **_each("circle_count", predicted_count=(None,)),
        **_each("newton_bench", extracted_law=(None,)),
        **_each("litmus_agent", predicted_value=(None,)),
        **_each("terminus_judge", failure_reason=("model_output_invalid",)),
    }
)
"""Resources server -> what its results hold where it found no answer: all of these fields."""


def answer_found(server: str | None, result: Mapping[str, Any]) -> bool | None:
    """Return whether a packaged resources server found an answer, by its result; `None` where nothing says it."""
    fields = NOTHING_FOUND.get(server or "")
    if fields is None or not fields.keys() <= result.keys():
        return None
    if not all(result[name] in values for name, values in fields.items()):
        return True
    # It extracts nothing after a timeout of its library either, so only an answer without a box says it.
    return None if server == "math_with_judge" and _has_box(result) else False


def is_box_unread(result: Mapping[str, Any]) -> bool:
    """Whether math_verify read nothing in a box and no judge was asked, by the result of math_with_judge or a server made of it.

    That is what it says after its 5 seconds, or the server's 10, are up, whatever the box holds.
    """
    is_unread = result.get("library_reward") == 0 and result.get("extracted_answer", 0) is None
    return is_unread and not result.get("judge_evaluations") and _has_box(result)


def _has_box(result: Mapping[str, Any]) -> bool:
    """Whether the last box in its messages is closed and not blank: of no other does the server ask math_verify."""
    said = (text_of(item.get("content")) for item in items_of(result)[1] if item.get("type") == "message")
    _, box, rest = "".join(said).rpartition(r"\boxed{")
    depths = accumulate(((char == "{") - (char == "}") for char in rest), initial=1)
    end = next((place for place, depth in enumerate(depths) if not depth), 0)
    return bool(box and end and rest[: end - 1].strip())
