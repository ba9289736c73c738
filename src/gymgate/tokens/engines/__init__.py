"""Engines sample token ids: an inference server, a trainer's servers, a model in this process, a function."""

from gymgate.tokens.engines.base import CallableEngine, Engine, Sample
from gymgate.tokens.engines.colocated import ColocatedEngine
from gymgate.tokens.engines.http import SGLangEngine, VLLMCompletionsEngine, VLLMGenerateEngine
from gymgate.tokens.engines.huggingface import HuggingFaceEngine
from gymgate.tokens.engines.verl import ServerManagerEngine

__all__ = [
    "CallableEngine",
    "ColocatedEngine",
    "Engine",
    "HuggingFaceEngine",
    "SGLangEngine",
    "Sample",
    "ServerManagerEngine",
    "VLLMCompletionsEngine",
    "VLLMGenerateEngine",
]
