"""The renderer of a tokenizer, from the `renderers` package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymgate.errors import ConfigError, MissingExtraError
from gymgate.tokens.conversation import Renderer


def make_renderer(
    tokenizer: Any, name: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Renderer:
    """The renderer that the package knows for the tokenizer's model, or the one called `name` (`qwen3`, `glm-5`, ...).

    `ConfigError` for a name, or chat template arguments, that it does not know.
    """
    try:
        from renderers import config_from_name, create_renderer
    except ImportError as error:
        raise MissingExtraError("renderers is not installed: pip install 'gymgate[trl]'") from error
    kwargs = dict(chat_template_kwargs or {}) or None
    try:
        made: Renderer = create_renderer(
            tokenizer, None if name is None else config_from_name(name), chat_template_kwargs=kwargs
        )
    except ValueError as error:
        raise ConfigError(f"renderer {name or 'of the tokenizer'!r}: {error}") from error
    return made
