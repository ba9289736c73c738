"""The settings that NeMo Gym's model server reads from a request's `metadata` for a chat-completions endpoint.

Rows carry per-sample settings there, because Gym's request model forbids unknown fields.
"""

from __future__ import annotations

from typing import Any

from gymgate.core import codec
from gymgate.core.errors import ConfigError
from gymgate.gateway.dialects.reading import Json, metadata_of, without

_FILES = ("audio_path", "audio_paths")
_CONSUMED = ("extra_body", "chat_template_kwargs", "audio_data")


def apply_gym_metadata(body: Json) -> Json:
    """Apply `metadata.extra_body`, `.chat_template_kwargs` and `.audio_data` to a chat request.

    A field of the body wins over `extra_body`; `metadata.chat_template_kwargs` wins over the body's.
    `ConfigError` for JSON that does not parse, and for audio by file path, which only Gym's own server can read.
    """
    metadata = metadata_of(body)
    if not metadata:
        return body
    _refuse_files(metadata)
    merged = {**_object(metadata, "extra_body"), **body}
    if kwargs := _object(metadata, "chat_template_kwargs"):
        merged["chat_template_kwargs"] = {**(body.get("chat_template_kwargs") or {}), **kwargs}
    if audio := metadata.get("audio_data"):
        merged["messages"] = _with_audio(body.get("messages") or [], audio)
    rest = without(metadata, *_CONSUMED)
    return {**merged, "metadata": rest} if rest else without(merged, "metadata")


def _refuse_files(metadata: Json) -> None:
    for name in _FILES:
        if metadata.get(name):
            raise ConfigError(
                f"metadata.{name}={metadata[name]!r} is a file; inline it as a data URL in metadata.audio_data"
            )


def _object(metadata: Json, name: str) -> Json:
    value: Any = metadata.get(name) or {}
    try:
        value = codec.loads_own(value.encode()) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"metadata.{name} is not JSON ({error}): {value!r}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"metadata.{name} must be a JSON object, not {value!r}")
    return value


def _with_audio(messages: list[Json], audio: str) -> list[Json]:
    """Put the clip before the last user message's text, where audio models expect it."""
    clip = {"type": "audio_url", "audio_url": {"url": audio}}
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            content = messages[index].get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            spoken = {**messages[index], "content": [clip, *parts]}
            return [*messages[:index], spoken, *messages[index + 1 :]]
    return [*messages, {"role": "user", "content": [clip]}]
