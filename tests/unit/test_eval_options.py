"""The settings of an eval as any SDK's command line gives them: texts, JSON, and names with commas between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gymgate.core.config import HTTPEndpoint
from gymgate.integrations.eval_options import EvalOptions


def models(**given: Any) -> dict[str, Any]:
    return dict(EvalOptions(models=given).run_spec().stack.models)


def test_an_endpoint_is_an_address_a_word_or_fields() -> None:
    found = models(
        url="http://h/v1",
        fields={"base_url": "http://h/v1", "model": "m"},
        own="policy",
        gone="none",
        null=None,
    )
    assert found["url"] == HTTPEndpoint(base_url="http://h/v1")
    assert found["fields"] == HTTPEndpoint(base_url="http://h/v1", model="m")
    assert [found[name] for name in ("own", "gone", "null")] == ["policy", "none", "none"]


def test_a_key_is_not_saved_with_the_run() -> None:
    with pytest.raises(ValidationError, match="api_key_env"):
        EvalOptions(models={"judge": {"base_url": "http://h/v1", "api_key": "secret"}})


def test_lists_come_as_json_or_with_commas(tmp_path: Path) -> None:
    """A path may have a comma."""
    (path := tmp_path / "a, b").mkdir()
    given: dict[str, Any] = {"env_vars": "ONE, TWO", "component_roots": str(path), "env": "mcqa, weather"}
    options = EvalOptions(**given)
    assert (options.env_vars, options.component_roots) == (["ONE", "TWO"], [str(path)])
    assert options.environment_names() == ("mcqa", "weather")
    assert EvalOptions(env='["mcqa"]').environment_names() == ("mcqa",)


def test_settings_of_one_environment_need_one() -> None:
    assert EvalOptions(env="mcqa", agent="a").environment_names() == ("mcqa",)
    for setting in ({"agent": "a"}, {"config": "c"}, {"overrides": {"x": 1}}):
        with pytest.raises(ValidationError, match=next(iter(setting))):
            EvalOptions(env=["mcqa", "weather"], **setting)  # type: ignore[arg-type]


def test_an_override_is_the_value_that_its_text_means() -> None:
    options = EvalOptions(env="mcqa", overrides={"a": {"b": "true", "c": "2"}, "d": "text"})
    [environment] = options.run_spec().stack.environments
    assert not isinstance(environment, str)
    assert dict(environment.overrides) == {"a.b": True, "a.c": 2, "d": "text"}


def test_a_run_is_called_by_its_environments_and_is_no_demonstration_once_rows_are_chosen() -> None:
    assert EvalOptions(env=["/some/where/mine.yaml", "mcqa"]).name == "mine+mcqa"
    assert EvalOptions().is_demonstration
    assert not EvalOptions(rows=5).is_demonstration
    assert not EvalOptions(env="mcqa").is_demonstration
