"""Exact tokens: the ids that a policy was shown and the ids it sampled, from the rendering to the training row."""

from gymgate.tokens.conversation import TokenConversation, TokenPolicy
from gymgate.tokens.engines import Engine, Sample
from gymgate.tokens.segments import TokenTurn, assemble, prefix_misses, recorded_turns

__all__ = [
    "Engine",
    "Sample",
    "TokenConversation",
    "TokenPolicy",
    "TokenTurn",
    "assemble",
    "prefix_misses",
    "recorded_turns",
]
