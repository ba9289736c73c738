"""One way of running rows, its rollouts written in one form: the other side of `benchmarks agreement`.

    python -m benchmarks.doors gymgate|verifiers|trl|inspect|openenv JOBS.json OUTPUT.json

Runs in the interpreter that has the SDK, one rollout at a time. `JOBS.json` has the server's address and, for each case, its
rows and settings; `OUTPUT.json` gets the outcomes of each case by row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.engine.server import MODEL

Json = dict[str, Any]
Items = list[list[str]]
TIMEOUT_S = 900.0
KEY = "GYMGATE_BENCHMARK_KEY"


@dataclass(frozen=True)
class Job:
    """Rows of one case, and how to run them."""

    environment: str
    data: str
    settings: dict[str, Any]
    judged: bool
    url: str
    """Of the vLLM server, without `/v1`."""
    dialect: str = "chat"
    gym: str = "0.7.0"
    stock_servers: bool = False

    @property
    def judges(self) -> dict[str, str]:
        """The policy judges too."""
        return {"genrm_model": "policy"} if self.judged else {}

    @property
    def rows(self) -> list[Json]:
        return [json.loads(line) for line in Path(self.data).read_text().splitlines()]


@dataclass(frozen=True)
class Outcome:
    """One rollout, without what differs between any two."""

    transcript: Items = field(default_factory=list)
    reward: float | None = None
    truncated: bool = False
    usage: list[int] | None = None
    """Tokens of the policy's prompts and answers, summed over its calls; `None` where they are not said."""
    failed: str = ""
    """What failed; empty where the rollout has a result."""


def transcript(result: Json) -> Items:
    """The items of a response, kind and content; and why it ended, if its agent says so."""
    items = []
    for item in result["response"]["output"]:
        kind = item["type"]
        if kind == "function_call":
            items.append([kind, item["name"], item["arguments"]])
        elif kind == "function_call_output":
            items.append([kind, str(item["output"])])
        else:
            items.append([kind, item.get("role", ""), text_of(item.get("content") or item.get("summary"))])
    if reason := (result["response"].get("metadata") or {}).get("ng_termination_reason"):
        items.append(["ended", reason])
    return items


def text_of(content: Any) -> str:
    """The text of a message's content."""
    return (
        content
        if isinstance(content, str)
        else "".join(part.get("text") or part.get("refusal") or "" for part in content or [])
    )


def counted(*usage: int | None) -> list[int] | None:
    """Usage, unless no answer has been counted."""
    return [count or 0 for count in usage] if any(usage) else None


def outcome(rollout: Mapping[str, Any], reward: float | None, usage: list[int] | None) -> Outcome:
    """A rollout's record, with reward and usage as the SDK shows them."""
    if rollout.get("error"):
        return Outcome(usage=usage, failed=f"{rollout['error']['type']}: {rollout['error']['message']}")
    return Outcome(transcript(rollout["result"]), reward, rollout["status"] == "truncated", usage)


def policy_usage(calls: Iterable[Mapping[str, Any]]) -> list[int] | None:
    """Tokens of a record's calls of the policy."""
    usages = [call.get("usage") or {} for call in calls if call["model_server"] == "policy_model"]
    return counted(
        *(sum(usage.get(name) or 0 for usage in usages) for name in ("input_tokens", "output_tokens"))
    )


def by_gymgate(job: Job) -> Iterator[Outcome]:
    """`gymgate run`."""
    output = Path(job.data).with_suffix(".stock" if job.stock_servers else ".gymgate")
    command = [sys.executable, "-m", "gymgate", "run", job.environment, "--data", job.data, "-c", "1"]
    command += ["--gym", job.gym, *["--stock-servers"] * job.stock_servers]
    command += ["-b", f"{job.url}/v1", "--dialect", job.dialect, "--retries", "0", "-o", str(output)]
    command += [part for pair in job.settings.items() for part in ("--set", "=".join(pair))]
    command += [part for pair in job.judges.items() for part in ("--judge", "=".join(pair))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [
        json.loads(line)
        for name in ("rollouts.jsonl", "failures.jsonl")
        if (output / name).exists()
        for line in (output / name).read_text().splitlines()
    ]
    if len(lines) != len(job.rows):
        raise RuntimeError(f"gymgate run ended with {done.returncode}:\n{done.stderr[-3000:]}")
    for line in sorted(lines, key=lambda each: each["line"]):
        yield outcome(line, line.get("reward"), policy_usage(line.get("calls") or []))


def by_verifiers(job: Job) -> Iterator[Outcome]:
    """`load_environment` and verifiers' evaluation client."""
    import verifiers.v1 as vf

    from nemo_gym_env import load_environment

    env = load_environment(
        env=job.environment,
        data=job.data,
        overrides=job.settings,
        models=job.judges,
        dialect=job.dialect,
        timeout_s=TIMEOUT_S,
    )
    client = vf.EvalClientConfig(base_url=f"{job.url}/v1", api_key_var=KEY)
    context = vf.ModelContext(client=client, model=MODEL)

    async def run() -> list[Any]:
        async with env.serving():
            slots = [slot for task in env.taskset.load() for slot in env.slots(task, 1)]
            return [(await env.run_slot(slot, context)).traces[0] for slot in slots]

    for trace in asyncio.run(run()):
        reward, usage = trace.rewards.get("reward"), trace.usage
        record = trace.info["nemo_gym"]
        yield outcome(
            record,
            reward and reward.score,
            usage and counted(usage.input_tokens, usage.completion_tokens),
        )


def by_inspect(job: Job) -> Iterator[Outcome]:
    """The task `gymgate/nemo_gym`."""
    from inspect_ai import eval as evaluate

    arguments = {"env": job.environment, "data": job.data, "overrides": job.settings, "models": job.judges}
    (log,) = evaluate(
        "gymgate/nemo_gym",
        task_args={**arguments, "timeout_s": TIMEOUT_S},
        model=f"openai-api/local/{MODEL}",  # `openai/` drops the temperature of a model that is not OpenAI's
        model_base_url=f"{job.url}/v1",
        model_args={"api_key": "none", "responses_api": job.dialect == "responses", "strict_tools": False},
        max_samples=1,
        max_connections=1,
        fail_on_error=False,
        display="none",
        log_dir=str(Path(job.data).with_suffix(".inspect")),
    )
    if log.error:
        raise RuntimeError(log.error.message)
    for sample in sorted(log.samples, key=lambda each: each.metadata["nemo_gym"]["line"]):
        usages = sample.model_usage.values()
        read = sum(each.input_tokens + (each.input_tokens_cache_read or 0) for each in usages)
        usage = counted(read, sum(each.output_tokens for each in usages))
        record, scores = sample.store.get("nemo_gym"), sample.scores or {}
        if record is None:
            yield Outcome(usage=usage, failed=sample.error.message)
        else:
            yield outcome(record, scores["reward"].value if scores else None, usage)


def by_trl(job: Job) -> Iterator[Outcome]:
    """`NeMoGymSpec.rollout_func` with a `GRPOTrainer` in server mode, one prompt at a time; no weights are sent."""
    from renderers import parsers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.engine.model import real_model
    from benchmarks.engines import RENDERER, TextToolParser
    from gymgate.core.config import EnvironmentConfig
    from gymgate.tokens.conversation import make_renderer
    from gymgate.trl import NeMoGymSpec

    parsers.TOOL_PARSERS["hermes_text"] = TextToolParser
    arguments = GRPOConfig(
        output_dir=str(Path(job.data).with_suffix(".trl")),
        use_cpu=True,
        bf16=False,
        report_to=[],
        temperature=0.0,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=8192,  # of a rollout; its rows bound each answer
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=job.url,
    )
    kept: list[Any] = []

    class Spec(NeMoGymSpec):
        """Keeps the rollouts: TRL is given their ids, masks and rewards."""

        async def _run_all(self, *given: Any) -> Any:
            kept[:] = await super()._run_all(*given)
            return kept

    spec = Spec(
        job.environment,
        data=job.data,
        eval_data=job.data,
        models=job.judges,
        limits={"timeout_s": TIMEOUT_S},
        score_truncated=True,
        renderer=lambda tokenizer: make_renderer(tokenizer, RENDERER),
    )
    environment = EnvironmentConfig(name=job.environment, overrides=tuple(job.settings.items()))
    stack = spec.settings.stack.model_copy(update={"environments": (environment,)})
    spec.settings = spec.settings.model_copy(update={"stack": stack})
    with mock.patch("trl.generation.vllm_client.VLLMClient.init_communicator"), spec:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(real_model(), dtype="float32"),
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(real_model()),
            train_dataset=spec.train_dataset,
            rollout_func=spec.rollout_func,
            reward_funcs=spec.reward_funcs,
        )
        assert spec.eval_dataset is not None
        for prompt in spec.eval_dataset["prompt"]:
            batch = spec.rollout_func([prompt], trainer)
            rollout = kept[0].rollout.model_dump(mode="json")
            yield outcome(rollout, batch["env_reward"][0], policy_usage(rollout["calls"]))


@contextlib.contextmanager
def env_server(job: Job) -> Iterator[str]:
    """`gymgate serve-env`: its base URL."""
    command = [sys.executable, "-m", "gymgate", "serve-env", job.environment, "--data", job.data]
    command += ["--port", "0", *(part for pair in job.settings.items() for part in ("--set", "=".join(pair)))]
    log = Path(job.data).with_suffix(".openenv")
    with log.open("w") as sink:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0]
                return
        raise RuntimeError(log.read_text()[-3000:])
    finally:
        server.terminate()
        server.communicate(timeout=60)


def by_openenv(job: Job) -> Iterator[Outcome]:
    """A client of `gymgate serve-env` in the agent's place: the messages, tools and sampling settings of the row to vLLM."""
    from openenv.core import GenericEnvClient

    limit = max([int(value) for name, value in job.settings.items() if name.endswith("max_steps")], default=0)
    with env_server(job) as url, GenericEnvClient(base_url=url, message_timeout_s=TIMEOUT_S).sync() as env:
        for number, row in enumerate(job.rows):
            try:
                yield play(env, number, row["responses_create_params"], job, limit)
            except RuntimeError as error:
                yield Outcome(failed=str(error))


def play(env: Any, number: int, params: Json, job: Job, limit: int) -> Outcome:
    """Play a row: `limit` model calls if not 0. Only a message ends an episode with tools, so an empty one does where an agent
    stops after a call."""
    shown = env.reset(index=number).observation["messages"]
    tools = env.step({"type": "list_tools"}).observation["tools"]
    messages = [
        {"role": "system" if one["role"] == "developer" else one["role"], "content": text_of(one["content"])}
        for one in shown
    ]
    items: Items = []
    rewards: list[float | None] = []
    usage = [0, 0]
    for call in range(1, 100):
        answer = ask(job.url, messages, tools, params)
        text, calls = answer["message"].get("content") or "", answer["message"].get("tool_calls") or []
        usage = [one + other for one, other in zip(usage, answer["usage"], strict=True)]
        messages.append(answer["message"])
        if text or not calls:
            items.append(["message", "assistant", text])
        items += [
            ["function_call", each["function"]["name"], each["function"]["arguments"]] for each in calls
        ]
        truncated = answer["finish_reason"] == "length"
        for each in [] if truncated else calls:
            name, given = each["function"]["name"], json.loads(each["function"]["arguments"])
            step = env.step({"type": "call_tool", "tool_name": name, "arguments": given})
            items.append(["function_call_output", step.observation["result"]])
            messages.append({"role": "tool", "tool_call_id": each["id"], "content": items[-1][1]})
        if calls and not truncated and call != limit:
            continue
        step = env.step({"type": "message", "content": "" if calls else text})
        rewards.append(step.reward)
        if step.done:
            break
        for new in step.observation["messages"]:
            messages.append(new)
            items.append(["message", new["role"], new["content"]])
    reward = None if None in rewards else sum(value or 0.0 for value in rewards)
    return Outcome(items, reward, truncated, counted(*usage))


def ask(url: str, messages: list[Json], tools: list[Json], params: Json) -> Json:
    """vLLM's answer; where the prompt exceeds its context an empty one, as from NeMo Gym's server."""
    from openai import BadRequestError, OpenAI

    body: Json = {"temperature": params["temperature"], "max_tokens": params["max_output_tokens"]}
    if tools:
        wanted: Any = params.get("tool_choice") or "auto"
        named = isinstance(wanted, dict)
        body["tool_choice"] = {"type": "function", "function": {"name": wanted["name"]}} if named else wanted
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["input_schema"],
                },
            }
            for tool in tools
        ]
    client: Any = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
    try:
        answer = client.chat.completions.create(model=MODEL, messages=messages, **body)
    except BadRequestError as error:
        if "context length" not in str(error):
            raise
        return {"message": {"role": "assistant", "content": ""}, "finish_reason": "length", "usage": [0, 0]}
    choice = answer.choices[0]
    return {
        "message": choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
        "finish_reason": choice.finish_reason,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
    }


def read(path: Path) -> dict[str, list[Outcome]]:
    """Outcomes of each environment, as far as they are there."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    return {name: [Outcome(**fields) for fields in outcomes] for name, outcomes in stored.items()}


def write(path: Path, outcomes: Mapping[str, list[Outcome]]) -> None:
    """Write them for `read`."""
    path.write_text(json.dumps({name: [asdict(each) for each in some] for name, some in outcomes.items()}))


DOORS = {
    "gymgate": by_gymgate,
    "verifiers": by_verifiers,
    "trl": by_trl,
    "inspect": by_inspect,
    "openenv": by_openenv,
}


def main() -> None:
    """Run every case and write."""
    door, jobs, output = sys.argv[1:]
    os.environ[KEY] = "none"
    done = read(Path(output))
    for job in (Job(**fields) for fields in json.loads(Path(jobs).read_text())):
        if job.environment in done:
            continue
        try:
            done[job.environment] = [*DOORS[door](job)]
        except Exception as error:  # the door refuses the environment
            done[job.environment] = [Outcome(failed=f"{type(error).__name__}: {error}")]
        print(f"{door}: {job.environment}", file=sys.stderr, flush=True)
        write(Path(output), done)


if __name__ == "__main__":
    main()
