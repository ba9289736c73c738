"""One rollout of an agent, and what its ids show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gymgate.doctor.compare import retokenised
from gymgate.doctor.policy import SAMPLING, RecordingEngine
from gymgate.rollout import Rollout
from gymgate.runtime.checks import Check
from gymgate.tokens import TokenConversation, TokenPolicy, prefix_misses

_FIXES: Mapping[str, str] = {
    "policy": "look at the server's log",
    "environment": "`gymgate check` tells whether the environment works at all",
    "data": "the row does not fit the agent: name another with --data",
    "timeout": "give it more time: --timeout",
    "infrastructure": "`gymgate doctor` without an environment looks at this machine",
}


def rollout_checks(
    agent: str,
    rollout: Rollout,
    conversation: TokenConversation,
    policy: TokenPolicy,
    engine: RecordingEngine,
    tokenizer: Any,
) -> Iterator[Check]:
    """Its outcome, lengths, retokenisation, prefix misses and sampling, a line each."""
    yield _outcome(agent, rollout, conversation, policy)
    if not conversation.turns:
        return
    yield _lengths(agent, conversation, policy)
    yield _tokenised_again(agent, conversation, tokenizer)
    if len(conversation.turns) > 1:
        yield _extension(agent, conversation)
    yield _sampling(agent, policy, engine)


def _outcome(agent: str, rollout: Rollout, conversation: TokenConversation, policy: TokenPolicy) -> Check:
    if rollout.error is not None:
        error = rollout.error
        return Check(agent, False, f"rollout failed ({error.kind}): {error.message}; {_FIXES[error.kind]}")
    told = f"{rollout.status}, reward {rollout.reward}, {rollout.timing.total_s:.1f} s"
    if not conversation.turns and rollout.status == "truncated":
        limit = policy.max_model_len
        return Check(
            agent,
            False,
            f"{told}: its first prompt leaves no room within {limit} ids; serve the model with more (--max-model-len)",
        )
    if not conversation.turns:
        return Check(
            agent,
            False,
            f"{told}, but the policy was never asked: nothing to train on; try another row: --data",
        )
    segments = len(conversation.segments)
    return Check(
        agent,
        True,
        f"{told}, {len(conversation.turns)} calls, {segments} training row{'s' * (segments != 1)}",
    )


def _lengths(agent: str, conversation: TokenConversation, policy: TokenPolicy) -> Check:
    turns = conversation.turns
    sampled = sum(len(turn.completion_ids) for turn in turns)
    longest = max(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
    told = f"{sampled} ids sampled, at most {longest} of {policy.max_model_len or '?'} in one call"
    if any(turn.logprobs is None and turn.completion_ids for turn in turns):
        return Check(f"{agent} lengths", False, f"{told}, without logprobs; the server must give them")
    return Check(f"{agent} lengths", True, f"{told}, a finite logprob for each")


def _tokenised_again(agent: str, conversation: TokenConversation, tokenizer: Any) -> Check:
    again = retokenised(
        conversation.turns,
        lambda ids: str(tokenizer.decode(ids)),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
    )
    name = f"{agent} ids"
    if not again.differing:
        return Check(name, True, "the text, tokenised again, gives the ids that were sampled")
    told = f"tokenised again, {again.differing} of {again.sampled} ids would differ ({again.example})"
    return Check(name, None, f"{told}; training gets them as they were sampled")


def _extension(agent: str, conversation: TokenConversation) -> Check:
    turns = conversation.turns
    name, misses = f"{agent} turns", prefix_misses(turns)
    if not misses:
        return Check(name, True, f"each of {len(turns)} prompts extends the ids before it")
    told = f"{misses} of {len(turns) - 1} further prompts do not extend the ids before them"
    return Check(
        name,
        None,
        f"{told}: the agent rewrites its history, or the template drops reasoning; more training rows",
    )


def _sampling(agent: str, policy: TokenPolicy, engine: RecordingEngine) -> Check:
    wrong = sorted(
        {name for sent in engine.sent for name, value in SAMPLING.items() if sent.get(name) != value}
    )
    name = f"{agent} sampling"
    if wrong:
        return Check(
            name,
            False,
            f"{', '.join(wrong)} did not go out as set; this is a defect of gymgate, please report it",
        )
    told = ", ".join(f"{key} {value:g}" for key, value in SAMPLING.items())
    overruled = ", ".join(sorted(policy.guard.overruled))
    asks = f"; the row asks for another {overruled}: the trainer's wins" if overruled else ""
    return Check(name, True, f"{told} on each of {len(engine.sent)} calls{asks}")
