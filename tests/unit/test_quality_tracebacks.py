"""The author's part of a traceback, taken from a server's log."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import gymgate
from gymgate.quality.tracebacks import last_traceback

GYMGATE = Path(gymgate.__file__).parent

VERIFY = """\
(own)   File "/cache/lib/python3.13/site-packages/fastapi/routing.py", line 762, in app
(own)     raw_response = await run_endpoint_function(
(own)                    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
(own)   File "/home/me/own/app.py", line 34, in verify
(own)     share = txt
(own)             ^^^
(own) NameError: name 'txt' is not defined
(own)
(own) repr(e): NameError("name 'txt' is not defined")
(own) INFO:     Shutting down
"""


def test_the_last_traceback_keeps_the_frames_of_the_environments_own_code() -> None:
    head = "(own) Formatted exception: Traceback (most recent call last):\n"
    first = (
        head
        + '(own)   File "/home/me/own/other.py", line 1, in f\n(own)     f()\n(own) ValueError: earlier\n'
    )
    assert last_traceback(f"(own) started\n{first}{head}{VERIFY}") == textwrap.dedent(
        """\
          File "/home/me/own/app.py", line 34, in verify
            share = txt
                    ^^^
        NameError: name 'txt' is not defined"""
    )


def test_of_a_server_that_did_not_start_the_line_is_named() -> None:
    log = f"""\
Traceback (most recent call last):
  File "{GYMGATE}/stack/forkserver/serving.py", line 47, in serve
    runpy.run_path(directory)
  File "<frozen runpy>", line 287, in run_path
  File "/home/me/own/app.py", line 11
    class Config((Base):
                      ^
SyntaxError: invalid syntax
"""
    assert last_traceback(log).splitlines() == [
        '  File "/home/me/own/app.py", line 11',
        "    class Config((Base):",
        "                      ^",
        "SyntaxError: invalid syntax",
    ]


def test_without_own_frames_the_last_one_stays_and_without_a_traceback_nothing() -> None:
    frames = [f'  File "/x/site-packages/{name}.py", line 2, in {name}' for name in "ab"]
    log = "\n".join(["Traceback (most recent call last):", *frames, "KeyError: 1", ""])
    assert last_traceback(log) == '  File "/x/site-packages/b.py", line 2, in b\nKeyError: 1'
    assert last_traceback("INFO: started\n") == ""
    assert last_traceback("Traceback (most recent call last):\n  File") == ""


def test_of_a_field_that_pydantic_refuses_the_reason_is_given_and_not_pydantics_code() -> None:
    log = """\
(own) Traceback (most recent call last):
(own)   File "/x/site-packages/responses_api_agents/simple_agent/app.py", line 500, in run
(own)     return Response.model_validate(result)
(own)   File "/x/site-packages/pydantic/main.py", line 792, in model_validate
(own)     return cls.__pydantic_validator__.validate_python(
(own) pydantic_core._pydantic_core.ValidationError: 1 validation error for Response
(own) reward
(own)   Input should be a valid number [type=float_type, input_value=None, input_type=NoneType]
(own)     For further information visit https://errors.pydantic.dev/2.14/v/float_type
"""
    assert last_traceback(log).splitlines() == [
        '  File "/x/site-packages/responses_api_agents/simple_agent/app.py", line 500, in run',
        "    return Response.model_validate(result)",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for Response: reward: "
        "Input should be a valid number [type=float_type, input_value=None, input_type=NoneType]",
    ]


def test_a_long_line_takes_no_time_in_proportion_to_its_square() -> None:
    head = 'Traceback (most recent call last):\n  File "/own/app.py", line 1, in verify\n'
    started = time.process_time()
    assert last_traceback(f"{head}ValueError: {'x' * 50_000}").endswith("xx")
    assert time.process_time() - started < 2
