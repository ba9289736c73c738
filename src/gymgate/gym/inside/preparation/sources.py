"""Sources of rows: what an environment's config declares, and the agents that the rows go to."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..names import gym_symbol
from ..resolve import resolve
from .events import refusal

AGENTS, RESOURCES = "responses_api_agents", "resources_servers"


@dataclass
class RawSource:
    """One dataset, script or file that raw rows come from."""

    name: str
    type: str
    """`train`, `validation`, ...: the file that its rows go to."""
    dataset: dict[str, Any]
    """As the config declares it."""
    agent: str | None = None
    """Instance that its rows go to; `None`: the one that each row names, else the config's."""
    server: str = ""
    """`kind/implementation` that verifies its rows."""
    origin: dict[str, Any] | None = None
    """Where its file comes from, if it is there already."""

    @property
    def huggingface(self) -> dict[str, Any]:
        """`repo_id` and `artifact_fpath`; empty for data from elsewhere."""
        source = self.dataset.get("source") or {}
        own = source if source.get("type") == "huggingface" else self.dataset.get("huggingface_identifier")
        return dict(own or {})


class DeclaredData:
    """An environment's config as NeMo Gym's parser reads it, with placeholders for what only its servers need."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.config = parse(order)

    def blocks(self) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        """Instance, kind, implementation and settings of each agent and resources server."""
        for name, block in self.config.items():
            for kind in (AGENTS, RESOURCES) if isinstance(block, dict) else ():
                for type_, settings in (block.get(kind) or {}).items():
                    if isinstance(settings, dict):
                        yield name, kind, type_, settings

    def agents(self) -> list[str]:
        return [name for name, kind, _, _ in self.blocks() if kind == AGENTS]

    def default_agent(self) -> str:
        """The agent that the order names, else the config's first."""
        agents, name = self.agents(), self.order["agent"]
        if name is not None and name not in agents:
            choices = ", ".join(agents)
            raise refusal("ConfigError", f"there is no agent {name!r}; the config has {choices}")
        if not agents:
            raise refusal("ConfigError", "its config defines no agent that rows could go to")
        return str(name or agents[0])

    def sources(self) -> list[RawSource]:
        """Declared datasets of the wanted types, in the config's order; at least one."""
        declared = [
            (name, dataset)
            for name, _, _, settings in self.blocks()
            for dataset in settings.get("datasets") or []
        ]
        sources = []
        for name, dataset in declared:
            if dataset.get("type") in self.order["types"]:
                agent = self._agent_of(name, dataset)
                prompt = {"prompt_config": self.order["prompt"]} if self.order["prompt"] else {}
                server = self.server_of(agent)
                sources.append(
                    RawSource(str(dataset["name"]), dataset["type"], {**dataset, **prompt}, agent, server)
                )
        if sources:
            return sources
        names = ", ".join(f"{dataset['name']} ({dataset['type']})" for _, dataset in declared)
        types = " or ".join(self.order["types"])
        what = f"no {types} data, only {names}" if names else "no data"
        raise refusal(
            "ConfigError",
            f"its config declares {what}; a script of it makes some with arguments after --, or give your own rows "
            "with --input FILE",
        )

    def server_of(self, agent: str) -> str:
        """`kind/implementation` of the agent's resources server, or of the agent itself if it has none."""
        servers = {name: (kind, type_, settings) for name, kind, type_, settings in self.blocks()}
        kind, type_, settings = servers[agent]
        reference = settings.get("resources_server")
        behind = reference.get("name") if isinstance(reference, dict) else None
        if behind in servers:
            kind, type_, _ = servers[behind]
        return f"{kind}/{type_}"

    def _agent_of(self, name: str, dataset: dict[str, Any]) -> str:
        """The agent of a dataset that the instance `name` declares, as NeMo Gym finds it."""
        if self.order["agent"] is not None:
            return self.default_agent()
        config = importlib.import_module("omegaconf").OmegaConf.create(self.config)
        taskset = {"taskset": dataset["taskset"]} if dataset.get("taskset") else {}  # unknown to nemo-gym 0.6
        agent = gym_symbol("resolve_dataset_agent")(config, name, pin=dataset.get("agent"), **taskset)
        if agent is None:
            problem = f"dataset {dataset['name']!r} is for several agents at once; give one with --agent"
            raise refusal("ConfigError", problem)
        return str(agent)


def parse(order: dict[str, Any]) -> dict[str, Any]:
    """The environment's config, which NeMo Gym's functions then find as their global one, with the hub's token."""
    request = dict(order["parse"])
    answer = resolve(request)
    if missing := answer.get("missing"):
        request["overrides"] = [*request["overrides"], *([key, "unset"] for key in missing)]
        answer = resolve(request)
    if "config" not in answer:
        problem = (
            answer.get("unknown")
            or answer.get("error")
            or f"it needs values: --set {answer['missing'][0]}=VALUE"
        )
        raise refusal("ConfigError", f"NeMo Gym cannot read its config: {' '.join(problem.split())}")
    config: dict[str, Any] = answer["config"]
    if token := os.environ.get("HF_TOKEN"):
        config["hf_token"] = token
    omegaconf: Any = importlib.import_module("omegaconf").OmegaConf
    os.environ["NEMO_GYM_CONFIG_DICT"] = omegaconf.to_yaml(omegaconf.create(config))
    return config
