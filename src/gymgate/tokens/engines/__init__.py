"""What samples token ids: an inference server, or a model in this process."""

from gymgate.tokens.engines.base import Engine, Sample
from gymgate.tokens.engines.http import SGLangEngine, VLLMCompletionsEngine, VLLMGenerateEngine

__all__ = ["Engine", "SGLangEngine", "Sample", "VLLMCompletionsEngine", "VLLMGenerateEngine"]
