"""verl's own AgentLoopWorker drives real NeMo Gym environments; the rollouts come back as verl's DataProto."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("verl", reason="training tests need verl: see docs/training.md")
pytest.importorskip("support.verl_quiet")

from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import collate_fn

from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError, DataError, EnvironmentServerError, PolicyError
from gymgate.gym.runtime import ensure_runtime
from gymgate.integrations.training.rollouts import SampledRollout
from gymgate.integrations.verl.worker import Groups, LoopConfig, _workers
from gymgate.rollouts import Rollout, RolloutError, Segment
from gymgate.verl import NeMoGymAgentLoop
from support.conversations import tokenizer
from support.verl_parts import (
    BLEND,
    LOGPROB,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    VERSION,
    Scripted,
    example_rows,
    make_config,
    script,
)

BROKEN = RolloutError(kind="environment", message="its container is gone", type="EnvironmentServerError")

pytestmark = [
    pytest.mark.gym,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    """verl's config for a blend of three environments; one stack for the module."""
    return make_config(tmp_path_factory.mktemp("verl"), BLEND)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    site = ensure_runtime(RuntimeConfig()).site
    return {name: example_rows(site, name) for name in BLEND}


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def stacks_go() -> AsyncIterator[None]:
    """In a trainer they go with the worker's process."""
    yield
    workers = _workers.get(asyncio.get_running_loop(), {}).values()
    await asyncio.gather(*(worker.runner.close() for worker in workers))


def batch_of(config: DictConfig, *names: str) -> DataProto:
    """Rows of some of the environments, as verl's data loader gives them."""
    dataset = create_rl_dataset(config.data.train_files, config.data, None, None)
    items = [item for item in (dataset[i] for i in range(len(dataset))) if item["environment"] in names]
    return DataProto.from_single_dict(collate_fn(items), meta_info={"global_steps": 1})


def worker_of(config: DictConfig, server: Scripted) -> AgentLoopWorker:
    return AgentLoopWorker(config, server, None, None)


@pytest.mark.parametrize(
    "environments", [("workplace_assistant",), ("math_with_judge",), BLEND], ids="+".join
)
async def test_rollouts_come_back_as_a_batch(
    config: DictConfig, rows: dict[str, list[dict[str, Any]]], environments: tuple[str, ...]
) -> None:
    """Shapes, masks, logprobs, rewards, policy versions; what is masked 1 is what the policy said, word for word."""
    wanted = [row for name in environments for row in rows[name]]
    server = Scripted(wanted)
    made = await worker_of(config, server).generate_sequences(batch_of(config, *environments))
    count = len(wanted)
    mask, ids = made.batch["response_mask"], made.batch["responses"]
    assert made.batch["prompts"].shape == (count, PROMPT_LENGTH)
    assert ids.shape == mask.shape == made.batch["rollout_log_probs"].shape == (count, RESPONSE_LENGTH)
    assert made.batch["rm_scores"].sum(1).tolist() == [1.0] * count
    for number, row in enumerate(wanted):
        said = tokenizer().decode(ids[number][mask[number] == 1].tolist())
        turns = script(row) if "ground_truth" in row else script(row)[:1]
        assert said == "".join(turns)
        assert made.non_tensor_batch["__num_turns__"][number] == len(turns)
    assert (made.batch["rollout_log_probs"] == LOGPROB * mask).all()
    assert made.batch["rm_scores"].nonzero()[:, 1].tolist() == [
        int(row.sum()) - 1 for row in made.batch["attention_mask"][:, PROMPT_LENGTH:]
    ]
    assert set(made.non_tensor_batch["min_global_steps"]) == {VERSION}
    assert set(made.non_tensor_batch["max_global_steps"]) == {VERSION}
    assert made.non_tensor_batch["data_source"].tolist() == [
        name for name in environments for _ in rows[name]
    ]
    assert all(figure["generate_sequences"] > 0 for figure in made.meta_info["metrics"])


async def test_64_sessions_run_at_once(config: DictConfig, rows: dict[str, list[dict[str, Any]]]) -> None:
    """No session is answered before 64 of them have asked."""
    names = [
        name for name in BLEND if name != "math_with_judge"
    ]  # whose verifier has a clock for its answers
    server = Scripted([row for name in names for row in rows[name]], together=64)
    batch = batch_of(config, *names).repeat(7)[:64]
    made = await worker_of(config, server).generate_sequences(batch)
    scores = made.batch["rm_scores"].sum(1).tolist()
    assert scores == [1.0] * 64


async def test_what_a_policy_gets_wrong_scores_zero(
    config: DictConfig, rows: dict[str, list[dict[str, Any]]]
) -> None:
    server = Scripted(rows["workplace_assistant"], ("right", "wrong"))
    made = await worker_of(config, server).generate_sequences(
        batch_of(config, "workplace_assistant").repeat(2)
    )
    assert made.batch["rm_scores"].sum(1).view(-1, 2).sum(1).tolist() == [1.0] * 5


class Keeping(AgentLoopWorker):
    """Keeps what agent loops return, as verl's v1 worker gets it."""

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        return output


async def test_a_history_that_breaks_gives_an_output_for_each_piece(
    config: DictConfig, rows: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The policy spells its calls out, and each turn is rendered anew: no prompt continues the ids before it."""
    rollout = config.actor_rollout_ref.rollout
    entries = OmegaConf.load(rollout.agent.agent_loop_config_path)
    entries[0].renderer = {"name": "custom", "import_path": "support.verl_parts:Forgetful"}
    OmegaConf.save(entries, tmp_path / "agent.yaml")
    other = {
        "actor_rollout_ref": {"rollout": {"agent": {"agent_loop_config_path": str(tmp_path / "agent.yaml")}}}
    }
    worker = Keeping(
        OmegaConf.merge(config, other), Scripted(rows["workplace_assistant"], spelled=True), None, None
    )
    fields = {
        name: values[2] for name, values in batch_of(config, "workplace_assistant").non_tensor_batch.items()
    }
    outputs = await worker._run_agent_loop(
        {"temperature": 1.0, "logprobs": True},
        {"step": 1, "sample_index": 2, "rollout_n": 0, "validate": False},
        agent_name="nemo_gym",
        session_id=0,
        uid="u",
        **fields,
    )
    turns = script(rows["workplace_assistant"][2])
    assert len(outputs) == len(turns) == 4
    for output, turn in zip(outputs, turns, strict=True):
        assert tokenizer().decode(output.response_ids) == turn
        assert output.response_mask == [1] * len(output.response_ids)
        assert output.response_logprobs == [LOGPROB] * len(output.response_ids)
        assert output.reward_score == 1.0
        assert output.extra_fields["reward_extra_info"]["prefix_misses"] == 3


class Loop(NeMoGymAgentLoop):  # type: ignore[misc]
    """One session without verl's servers: its rollout is given."""

    def __init__(self, config: DictConfig, groups: Groups, option: bool = False, **fields: Any) -> None:
        self.config, self.rollout_config, self.groups = config, config.actor_rollout_ref.rollout, groups
        self.settings = LoopConfig.model_validate({"environments": "mcqa", "score_truncated": option})
        rollout = Rollout(id="r", environment="mcqa", agent="a", **fields)
        self.sampled = SampledRollout(
            rollout, [Segment(prompt_ids=[1], completion_ids=[2], mask=[1])], 0, 0, [1]
        )

    def _worker(self) -> Any:
        return SimpleNamespace(run=AsyncMock(return_value=self.sampled), groups=self.groups)


async def group_of(config: DictConfig, *rollouts: dict[str, Any], option: bool = False) -> list[Any]:
    """What verl gets from the sessions of one prompt, started as its worker starts them: rewards, or an error."""
    groups = Groups()
    sessions = [
        asyncio.create_task(
            Loop(config, groups, option, **fields).run(
                {}, nemo_gym_row="{}", environment="mcqa", session_id=number, uid="u"
            )
        )
        for number, fields in enumerate(rollouts)
    ]
    settled = await asyncio.gather(*sessions, return_exceptions=True)
    assert groups._open == {}
    return [
        found if isinstance(found, BaseException) else [output.reward_score for output in found]
        for found in settled
    ]


def validating(monkeypatch: pytest.MonkeyPatch, *uids: str) -> None:
    """verl's validation waits for these prompts."""

    async def kv_list(partition_id: str) -> dict[str, dict[str, Any]]:
        assert partition_id == "val"
        return {"val": {uid: {"status": "running"} for uid in uids}} if uids else {}

    monkeypatch.setattr("transfer_queue.async_kv_list", kv_list)


DONE = {"status": "completed", "reward": 0.5}
CUT = {"status": "truncated", "reward": 0.5}
FAILED = {"status": "failed", "error": BROKEN}


@pytest.mark.parametrize(
    ("fields", "option", "rewards"),
    [
        (DONE, False, [0.5]),
        (CUT, False, []),
        (CUT, True, [0.5]),
        ({"status": "masked", "reward": 0.5}, True, []),
        ({"status": "completed", "reward": None}, True, []),
        (FAILED, True, []),
    ],
)
async def test_what_counts_for_nothing_gives_no_output_and_keeps_its_siblings(
    config: DictConfig,
    fields: dict[str, Any],
    option: bool,
    rewards: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error would have verl's asynchronous modes evict the whole group."""
    validating(monkeypatch)
    assert await group_of(config, fields, DONE, fields, option=option) == [rewards, [0.5], rewards]


async def test_a_group_without_any_output_fails(config: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl draws another prompt for it, or stops with the reason; a finished group without rows it would count."""
    validating(monkeypatch)
    *empty, last = await group_of(config, FAILED, CUT, FAILED)
    assert empty == [[], []]
    assert isinstance(last, EnvironmentServerError)
    assert "its container is gone" in str(last)
    (masked,) = await group_of(config, {"status": "masked", "reward": 1.0})
    assert isinstance(masked, DataError)
    assert str(masked).startswith("masked")
    assert "1.0 (rollout r of mcqa)" in str(masked)


async def test_validation_counts_truncated_rollouts(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that overruns its context must not score higher for it."""
    validating(monkeypatch, "u")
    assert await group_of(config, CUT, DONE, {"status": "masked", "reward": 1.0}) == [[0.5], [0.5], []]
    validating(monkeypatch, "another")
    assert await group_of(config, CUT, DONE) == [[], [0.5]]


async def test_the_trainers_sampling_wins_and_a_difference_is_said_once(
    config: DictConfig, rows: dict[str, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of workplace_assistant ask for temperature 1.0."""
    colder = OmegaConf.merge(config, {"actor_rollout_ref": {"rollout": {"temperature": 0.7, "top_p": 0.9}}})
    server = Scripted(rows["workplace_assistant"])
    with caplog.at_level(logging.WARNING, logger="gymgate.tokens.sampling"):
        await worker_of(colder, server).generate_sequences(batch_of(config, "workplace_assistant"))
    for sampling in server.asked:
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.9, -1)
        assert sampling["logprobs"] is True
        assert 0 < sampling["max_tokens"] <= RESPONSE_LENGTH
    told = [record.message for record in caplog.records]
    assert len([line for line in told if "temperature=1.0" in line and "0.7" in line]) == 1


async def test_verls_v0_worker_has_no_place_for_a_failure(
    config: DictConfig, rows: dict[str, list[dict[str, Any]]]
) -> None:
    """Never a made-up row with a reward of 0: the error says what failed, and what to set."""
    server = Scripted(rows["mcqa"], ("broken",))
    with pytest.raises(ConfigError, match=r"policy: .*out of memory.*trainer.use_v1=true") as caught:
        await worker_of(config, server).generate_sequences(batch_of(config, "mcqa"))
    assert isinstance(caught.value.__cause__, PolicyError)


async def test_another_dataset_is_refused(config: DictConfig, rows: dict[str, list[dict[str, Any]]]) -> None:
    batch = batch_of(config, "mcqa")
    del batch.non_tensor_batch["nemo_gym_row"]
    with pytest.raises(ConfigError, match="NeMoGymDataset"):
        await worker_of(config, Scripted(rows["mcqa"])).generate_sequences(batch)
