"""A real stack whose servers run commands in sandboxes, with the provider that needs nothing: `local`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gymgate import acquire
from gymgate.core.config import EnvironmentConfig
from gymgate.core.errors import ConfigError, NeedMissingError
from support.sandboxes import CONFIG, GIVE_UP, ROWS, SOLVE, fix_repo, follows, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.timeout(240)]


async def test_a_repository_is_repaired_and_left_nowhere() -> None:
    outputs: list[str] = []
    config = stack_config(fix_repo("local"))
    async with acquire(config) as stack:
        solved = await stack.run(ROWS[0], policy=follows(SOLVE, outputs))
        given_up = await stack.run(ROWS[0], policy=follows(GIVE_UP))
        directory = Path((await stack.status())["directory"])
        assert [*(directory / "sandboxes").iterdir()] == []
    assert (solved.status, solved.reward) == ("completed", 1.0)
    assert (given_up.status, given_up.reward) == ("completed", 0.0)
    assert "FAILED (failures=3)" in outputs[1]
    assert not await asyncio.to_thread(directory.exists)


async def test_without_a_provider_nothing_starts_and_one_line_says_which_there_are() -> None:
    with pytest.raises(NeedMissingError, match=r"--sandbox NAME.*\blocal\b"):
        async with acquire(stack_config(fix_repo(None))):
            pass


async def test_a_provider_without_its_daemon_is_refused_with_those_that_can_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(NeedMissingError, match=r"'docker' .*\blocal\b"):
        async with acquire(stack_config(fix_repo("docker"))):
            pass


async def test_an_unknown_provider_is_refused_with_those_of_the_release() -> None:
    with pytest.raises(ConfigError, match=r"'dokcer'.* apptainer, daytona, docker"):
        async with acquire(stack_config(fix_repo("dokcer"))):
            pass


async def test_a_hosted_provider_without_its_key_is_refused_before_anything_is_installed() -> None:
    with pytest.raises(NeedMissingError, match=r"'e2b' .*--env-var E2B_API_KEY"):
        async with acquire(stack_config(fix_repo("e2b"))):
            pass


async def test_a_yaml_of_ones_own_and_several_configs_in_order(tmp_path: Path) -> None:
    """The second file makes the agent give up at once, so one step is all that it has; the provider's directory is ours."""
    (own := tmp_path / "sandbox.yaml").write_text(
        f"sandbox: {{local: {{workspace_root: {tmp_path}/here, shell: /bin/sh, concurrency: 2}}}}\n"
    )
    (second := tmp_path / "second.yaml").write_text(
        "fix_repo_simple_agent: {responses_api_agents: {simple_agent: {max_steps: 2}}}\n"
    )
    outputs: list[str] = []
    environment = EnvironmentConfig(name=str(CONFIG), config=("fix_repo", str(second)), sandbox=str(own))
    async with acquire(stack_config(environment)) as stack:
        rollout = await stack.run(ROWS[0], policy=follows(["pwd", "pwd", *SOLVE], outputs))
    assert len(rollout.calls) == 2
    assert str(tmp_path / "here") in outputs[0]
    assert rollout.reward == 0.0
