"""Check one rollout of an agent: its outcome, and what its ids show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gymgate.doctor import Finding
from gymgate.doctor.retokenise import retokenise
from gymgate.doctor.sampling_checks import SAMPLING, RecordingEngine
from gymgate.rollouts import Rollout
from gymgate.tokens import TokenConversation, TokenPolicy, prefix_misses

_FIXES: Mapping[str, str] = {
    "policy": "see the server's log",
    "environment": "`gymgate check` shows whether the environment works at all",
    "data": "the row does not fit the agent: give another with --data",
    "timeout": "give it more time: --timeout",
    "infrastructure": "`gymgate doctor` without an environment checks this machine",
}


def check_rollout(
    agent: str,
    rollout: Rollout,
    conversation: TokenConversation,
    policy: TokenPolicy,
    engine: RecordingEngine,
    tokenizer: Any,
) -> Iterator[Finding]:
    """Yield findings about its outcome, lengths, tokenisation, prefixes and sampling."""
    yield _outcome(agent, rollout, conversation, policy)
    turns = conversation.turns
    if not turns:
        return
    sampled = sum(len(turn.completion_ids) for turn in turns)
    longest = max(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
    lengths = f"{sampled} ids sampled, at most {longest} of {policy.max_model_len or '?'} in one call"
    if any(turn.logprobs is None and turn.completion_ids for turn in turns):
        yield Finding(f"{agent} lengths", False, f"{lengths}, without logprobs; the server must return them")
    else:
        yield Finding(f"{agent} lengths", True, f"{lengths}, a finite logprob for each")
    yield _check_ids(agent, conversation, tokenizer)
    if len(turns) > 1:
        yield _prefixes(agent, conversation)
    yield _check_sampling(agent, policy, engine.sent[conversation.session])


def _outcome(agent: str, rollout: Rollout, conversation: TokenConversation, policy: TokenPolicy) -> Finding:
    if (error := rollout.error) is not None:
        return Finding(agent, False, f"rollout failed ({error.kind}): {error.message}; {_FIXES[error.kind]}")
    outcome = f"{rollout.status}, reward {rollout.reward}, {rollout.timing.total_s:.1f} s"
    if conversation.turns:
        segments = len(conversation.segments)
        rows = f"{segments} training row{'s' * (segments != 1)}"
        return Finding(agent, True, f"{outcome}, {len(conversation.turns)} calls, {rows}")
    if rollout.status == "truncated":
        problem = f"its first prompt is longer than {policy.max_model_len} ids allow"
        fix = "serve the model with a larger --max-model-len"
    else:
        problem = "the agent never called the policy, so there is nothing to train on"
        fix = "try another row: --data"
    return Finding(agent, False, f"{outcome}: {problem}; {fix}")


def _check_ids(agent: str, conversation: TokenConversation, tokenizer: Any) -> Finding:
    result = retokenise(
        conversation.turns,
        lambda ids: str(tokenizer.decode(ids)),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
    )
    if not result.differing:
        return Finding(f"{agent} ids", True, "the text, tokenised again, gives the ids that were sampled")
    return Finding(
        f"{agent} ids",
        None,
        f"{result.differing} of {result.sampled} ids would differ if the text were tokenised again ({result.example}); "
        "training gets the ids that were sampled",
    )


def _prefixes(agent: str, conversation: TokenConversation) -> Finding:
    turns = conversation.turns
    missed = prefix_misses(turns)
    if not missed:
        return Finding(f"{agent} turns", True, f"each of {len(turns)} prompts extends the ids before it")
    return Finding(
        f"{agent} turns",
        None,
        f"{missed} of {len(turns) - 1} later prompts do not extend the ids before them (prefix misses), which makes more "
        "training rows: the agent rewrites its history, or the template drops reasoning",
    )


def _check_sampling(agent: str, policy: TokenPolicy, calls: Sequence[Mapping[str, Any]]) -> Finding:
    wrong = {name for sent in calls for name, value in SAMPLING.items() if sent.get(name) != value}
    if wrong:
        problem = f"{', '.join(sorted(wrong))} did not go out as set"
        return Finding(f"{agent} sampling", False, f"{problem}; this is a bug in gymgate, please report it")
    parameters = ", ".join(f"{key} {value:g}" for key, value in SAMPLING.items())
    overruled = ", ".join(sorted(policy.guard.overruled))
    note = f"; the row asks for another {overruled}, but the trainer's value is used" if overruled else ""
    return Finding(f"{agent} sampling", True, f"{parameters} on each of {len(calls)} calls{note}")
