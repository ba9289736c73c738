"""How an agent's code passes its rollout's key on to its model calls, read from its source with `servercode`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gymgate.catalog.servercode import CodeReader, classes_of, lineage, parse_module

MODEL_PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")
_REQUEST = "BaseRunRequest"
"""NeMo Gym's base class of `/run` request bodies."""
_HELPERS = frozenset(
    {
        "apply_rollout_prefix",
        "base_url_for_run",
        "current_rollout_id",
        "rollout_id_from_run",
        "rollout_path_prefix",
        "url_path_for_request",
        "url_path_for_run",
    }
)
"""NeMo Gym's functions that put a rollout's key into a URL or return the key."""


@dataclass(frozen=True)
class AgentCode:
    """How an agent treats its rollout's key."""

    helpers: bool
    """It builds the URLs of its model calls with NeMo Gym's helpers, which add the key."""
    client: bool
    """It calls the model through NeMo Gym's client while it handles `/run`, so the client can add the key."""
    entries: bool
    """Its request model keeps body entries that it does not declare."""
    policy_url: bool
    """It reads its policy's base URL from the body of `/run`."""


def read_agent(roots: Sequence[Path], directory: Path, entrypoint: str) -> AgentCode:
    """Read an agent's code: every module that its entrypoint reaches, including those of agents that it extends."""
    trees = [parse_module(path) for path in CodeReader(roots).reachable(directory, directory / entrypoint)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    asked = [server for node in nodes if (server := _model_asked(node)) is not None]
    asks_itself = "self.config.name" in asked  # in a new request, which knows no rollout
    return AgentCode(
        helpers=not asks_itself and any(_is_helper(node) for node in nodes),
        client=not asks_itself and bool(asked),
        entries=_keeps_entries(trees),
        policy_url=any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "body.policy_base_url" for node in nodes
        ),
    )


def _is_helper(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if name in _HELPERS:
        return True
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return node.func.attr == "resolve_model_base_url" and len(node.args) + len(node.keywords) > 1


def _model_asked(node: ast.AST) -> str | None:
    """Return the server expression of a call through NeMo Gym's client whose path is a model path without a key, else `None`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if node.func.attr not in ("post", "request"):
        return None
    given: dict[str | None, ast.expr] = dict(zip(("server_name", "url_path"), node.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords}
    path, server = given.get("url_path"), given.get("server_name")
    if server is None or not (isinstance(path, ast.Constant) and path.value in MODEL_PATHS):
        return None
    return ast.unparse(server)


def _keeps_entries(trees: Sequence[ast.Module]) -> bool:
    """Whether the request class of the first `run` method has `extra="allow"`, its own or inherited."""
    classes = classes_of(trees)
    for owner in classes.values():
        for name in _annotations_of_run(owner):
            ancestry = lineage(name, classes)
            if _REQUEST in ancestry:
                return any(_allows_entries(classes[each]) for each in ancestry if each in classes)
    return False


def _annotations_of_run(node: ast.ClassDef) -> list[str]:
    arguments = [
        argument
        for member in node.body
        if isinstance(member, ast.AsyncFunctionDef) and member.name == "run"
        for argument in (*member.args.posonlyargs, *member.args.args, *member.args.kwonlyargs)
    ]
    return [each.annotation.id for each in arguments if isinstance(each.annotation, ast.Name)]


def _allows_entries(node: ast.ClassDef) -> bool:
    own = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
    return any("extra='allow'" in ast.unparse(each) for each in own)
