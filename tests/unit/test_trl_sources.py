"""The environments and rows that a spec names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymgate.core.config import EnvironmentConfig, RuntimeConfig, StackConfig
from gymgate.core.errors import ConfigError, DataError
from gymgate.integrations.training.sources import WeightedSource, in_turn, read_rows
from gymgate.integrations.trl.dataset import open_environment_rows, weights_of
from gymgate.rollouts.row import make_row


def test_in_turn_is_every_row_once() -> None:
    rows = [make_row({"responses_create_params": {"input": str(i)}}, "f", i) for i in range(5)]
    sources = [WeightedSource("a", rows, 2.0), WeightedSource("b", rows[:3], 1.0)]
    drawn = list(read_rows(sources, in_turn(sources)))
    assert drawn == [("a", row) for row in rows] + [("b", row) for row in rows[:3]]


def test_a_row_of_another_agent_is_refused_when_the_dataset_is_made() -> None:
    named = {"responses_create_params": {"input": "hi"}, "agent_ref": {"name": "b_agent"}}
    rows = [make_row({**named, "agent_ref": None}, "f", 1), make_row(named, "f", 2)]
    [known] = sources = [WeightedSource("b", rows, 1.0, {"b_agent", "c_agent"})]
    assert len(list(read_rows(sources, in_turn(sources)))) == 2
    sources = [known._replace(environment="a", agents={"a_agent"})]
    with pytest.raises(DataError, match=r"f:2: .*'b_agent'.* 'a': a_agent") as told:
        list(read_rows(sources, in_turn(sources)))
    assert (told.value.path, told.value.line) == ("f", 2)


def test_names_get_weights() -> None:
    assert weights_of("mcqa") == {"mcqa": 1.0}
    assert weights_of(["a", "b"]) == {"a": 1.0, "b": 1.0}
    assert weights_of({"a": 2}) == {"a": 2.0}
    with pytest.raises(ConfigError, match="NeMoGymSpec"):
        weights_of([])


@pytest.mark.gym
def test_agents_of_an_environment_with_several_configs(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(
        "mcqa_simple_agent:\n  responses_api_agents:\n    simple_agent:\n      max_steps: 2\n"
    )
    environment = EnvironmentConfig(name="mcqa", config=("mcqa", str(tmp_path / "more.yaml")))
    config = StackConfig(environments=(environment,), runtime=RuntimeConfig(version="0.7.0"))
    [source] = open_environment_rows({"mcqa": 1.0}, "example", config)
    assert source.agents == {"mcqa_simple_agent"}
