"""Each entry of the table of graders that say whether they found an answer, against the release's own servers.

The first answer of a case has a format that the grader does not read, the second one a format that it reads.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig
from gymgate.gym.runtime import ensure_runtime
from gymgate.rollouts.no_answer import NOTHING_FOUND, answer_found
from gymgate.stack import acquire
from support.stacks import runtime, stack_config

pytestmark = pytest.mark.gym

LETTERS = [{"A": "one"}, {"B": "two"}]
JUDGE = {
    "judge_model_server": {"type": "responses_api_models", "name": "j"},
    "judge_responses_create_params": {"input": []},
}
RESPONSE = {
    **{"id": "r", "created_at": 0, "model": "m", "object": "response", "output": []},
    **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
}
CODE = ["I cannot.", "```python\nprint(1)\n```"]
UNCLOSED = ["```python\nprint(1)", "```python\nprint(1)\n```"]
SQL = ["It is one.", "```sql\nselect 2\n```"]
COMPARED = {"execute_and_compare": [False, None, None, None]}
TASK = {"verifier_metadata": {"task_id": "t"}}
CASES: dict[str, dict[str, Any]] = {
    "mcqa": {
        "row": {"options": LETTERS, "expected_answer": "B"},
        "answers": ["The answer is B.", "\\boxed{A}"],
    },
    "gpqa_diamond": {
        "row": {"options": LETTERS, "expected_answer": "B"},
        "answers": ["It is B, I think", "\\boxed{A}"],
    },
    "math_with_code": {"row": {"expected_result": "2"}, "answers": ["It is 2.", "\\boxed{3}"]},
    "math_with_judge": {
        "row": {"question": "?", "expected_answer": "2"},
        "answers": ["It is 2."],
        "config": {**JUDGE, "should_use_judge": False},
        "absent": [
            "math_verify",
            "math_verify.errors",
            "math_verify.metric",
            "math_verify.parser",
            "latex2sympy2_extended",
        ],
        "recorded": [0],
    },
    "swerl_llm_judge": {
        "row": {"options": LETTERS, "expected_answer": "B"},
        "answers": ["It is B.", "<solution>[A]</solution>"],
    },
    "imo_proofbench_judge": {"recorded": [3, 0]},
    "string_match": {"row": {"expected_answer": "x"}, "answers": ["It is x.", "Final answer: y"]},
    "ruler2": {
        "row": {"expected_answer": "B", "eval_type": "multichoice"},
        "answers": ["two", "Answer: A"],
        "absent": ["editdistance"],
    },
    "moldetox": {
        "row": {"verifier_metadata": {"answer": "CCO", "scoring_mode": "smiles"}},
        "answers": ["CCO", '{"answer": "C"}'],
        "absent": ["rdkit", "safe", "Levenshtein", "metrics"],
    },
    "code_gen": {
        "row": {"verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": ["1"]}}},
        "answers": CODE,
        "config": {"num_processes": 1, "unit_test_timeout_secs": 1, "debug": False},
        "tested": [[False], {}],
    },
    "evalplus": {
        "row": TASK,
        "answers": CODE,
        "config": {"dataset": "humaneval", "num_processes": 1},
        "replaced": {"_load_dataset_and_expected": [{"t": {"prompt": ""}}, {"t": 1}]},
        "tested": {},
    },
    "code_fim": {
        "row": TASK,
        "answers": CODE,
        "replaced": {"_load_split": {"t": {"prompt": "", "suffix": ""}}},
        "tested": {},
    },
    "bigcodebench": {
        "row": {"verifier_metadata": {"task_id": "t", "test": "", "entry_point": "f"}},
        "answers": UNCLOSED,
        "replaced": {"ensure_bcb_venv": "python"},
        "methods": {"_run_in_venv": {"status": "fail"}},
    },
    "scicodepile": {
        "row": {"verifier_metadata": {"task_id": "t", "test": "x", "entry_point": "f"}},
        "answers": UNCLOSED,
        "methods": {"_run_task": {"status": "fail"}},
    },
    "text_to_sql": {
        "row": {"sql": "select 1", "sql_dialect": "sqlite", "sql_prompt": "?"},
        "answers": SQL,
        "methods": {
            "_generate_judge_evaluation": [
                False,
                {"responses_create_params": {"input": []}, "response": RESPONSE},
            ]
        },
        "config": JUDGE,
    },
    "bird_sql": {
        "replaced": {"ensure_bird_sql": "/no"},
        "row": {"question": "?", "gt_sql": "select 1", "db_id": "d"},
        "answers": SQL,
        "functions": COMPARED,
    },
    "spider2_lite": {
        "replaced": {"ensure_spider2_lite": "/no"},
        "row": {"question": "?", "gold_sql": "select 1", "db_id": "d"},
        "answers": SQL,
        "config": {"spider2_lite_dir": "d"},
        "functions": COMPARED,
    },
    "arc_agi": {
        "row": {"train": [], "test_input": [[1]], "expected_output": [[1]], "task_id": "t"},
        "answers": ["one", "\\boxed{[[2]]}"],
    },
    "nvarc": {"row": {"expected_output": [[1]]}, "answers": ["one", "\\boxed{[[2]]}"]},
    "graphwalks": {
        "row": {"expected_answer": '["a"]', "problem_type": "bfs"},
        "answers": ["a", "Final Answer: [b]"],
    },
    "cvdp": {
        "absent": ["nltk", "nltk.translate", "nltk.translate.bleu_score", "rouge"],
        "row": {
            "verifier_metadata": {
                "task_id": "t",
                "categories": ["cid003", "easy"],
                "target_files": ["rtl/a.sv", "rtl/b.sv"],
                "harness_files": {},
            }
        },
        "answers": [
            "I cannot.",
            '{"code": [{"rtl/a.sv": "module a; endmodule"}, {"rtl/b.sv": "module b; endmodule"}]}',
        ],
    },
    "bunsenbench_chemistry_mcq": {
        "row": {"options": LETTERS, "expected_answer": "B"},
        "answers": ["I do not know.", "<choice>A</choice>"],
    },
    "spartqa": {
        "row": {"target": "left", "options": ["left", "right"]},
        "answers": ["<think>left</think>", "Final answer: right"],
    },
    "ragtruth": {"row": {"is_halu": True}, "answers": ["There is one.", '{"hallucination list": []}']},
    "imo_gradingbench": {"row": {"expected_answer": "Correct"}, "answers": ["7 of 7 points", "Almost"]},
    "math_proof_judgement": {
        "row": {"expected_judgement": "Judgement: Yes"},
        "answers": ["It holds.", "Judgement: No"],
    },
    "circle_count": {
        "row": {"circles": [{"color": "red"}], "target_color": "red"},
        "answers": ["one", "\\boxed{2}"],
    },
    "newton_bench": {
        "attributes": {"session_metadata": {"s": {"difficulty": "easy"}}},
        "row": {},
        "answers": ["F = ma", "<final_law>def f(): return 1</final_law>"],
    },
    "litmus_agent": {
        "row": {"expected_answer": 1.0, "answer_type": "float"},
        "answers": ["It is 1.", "((2))"],
    },
    "terminus_judge": {
        "absent": ["openapi_schema_validator"],
        "row": {"expected_answer": '{"commands": []}', "metadata": {"harness": "terminus_1"}},
        "answers": ["ls", '{"commands": []}'],
        "config": {**JUDGE, "judge_prompt_template_fpath": ""},
    },
}
"""Server -> case of tests/support/verify_rows.py."""


@pytest.mark.parametrize("version", ["0.6.0", "0.7.0"])
def test_each_entry_of_the_table_says_what_the_servers_verify_says(version: str) -> None:
    assert CASES.keys() == NOTHING_FOUND.keys()
    release = ensure_runtime(runtime(version))
    cases = {
        server: case
        for server, case in CASES.items()
        if (release.site / "resources_servers" / server).is_dir()
    }
    program = Path(__file__).parent.parent / "support" / "verify_rows.py"
    done = subprocess.run(
        [release.python, program],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    results = json.loads(done.stdout.splitlines()[-1])
    found = {
        server: said if isinstance(said, str) else [answer_found(server, result) for result in said]
        for server, said in results.items()
    }
    assert found == {server: [False, True] for server in cases}
    assert len(cases) >= 28


async def test_a_rollout_of_a_packaged_grader_says_whether_it_found_an_answer() -> None:
    row = {"options": LETTERS, "expected_answer": "B", "responses_create_params": {"input": "?"}}
    async with acquire(stack_config(EnvironmentConfig(name="mcqa"))) as stack:
        rollouts = [
            await stack.run(row, policy=lambda body, text=text: text) for text in ("It is B.", r"\boxed{A}")
        ]
    assert [rollout.answer_found for rollout in rollouts] == [False, True]
