"""Content parts: text, images, files, audio and video, as Responses and as chat-completions write them."""

from __future__ import annotations

from typing import Any

from gymgate.errors import ConfigError
from gymgate.gateway.dialects._read import Json, field, mappings, without_none

_TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def content_to_chat(content: Any, what: str) -> Any:
    """Responses content (a string or a list of parts) as chat content; `ConfigError` for a part chat lacks."""
    if content is None or isinstance(content, str):
        return content or ""
    return [part_to_chat(part, what) for part in mappings(content, f"content of {what}")]


def part_to_chat(part: Json, what: str) -> Json:
    kind = part.get("type")
    if kind in _TEXT:
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "input_image":
        return {"type": "image_url", "image_url": _image_to_chat(part, what)}
    if kind == "input_file":
        return {"type": "file", "file": _file_to_chat(part, what)}
    if kind == "input_video":
        source = part.get("video_url", part.get("video"))
        return {"type": "video_url", "video_url": source if isinstance(source, dict) else {"url": source}}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal") or ""}
    if kind in ("input_audio", "audio_url", "video_url", "image_url", "file"):
        return part
    raise ConfigError(
        f"content part of type {kind!r} in {what} cannot be sent to a chat-completions endpoint"
    )


def _image_to_chat(part: Json, what: str) -> Json:
    url = part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not url:
        raise ConfigError(
            f"an input_image in {what} has no image_url: chat-completions takes a URL or a data URL, "
            f"not file_id={part.get('file_id')!r}"
        )
    detail = part.get("detail")
    return without_none({"url": url, "detail": "high" if detail == "original" else detail})


def _file_to_chat(part: Json, what: str) -> Json:
    if part.get("file_url"):
        raise ConfigError(
            f"an input_file in {what} has file_url={part['file_url']!r}: "
            "chat-completions takes file_data or file_id"
        )
    return {name: part[name] for name in ("file_data", "file_id", "filename") if part.get(name) is not None}


def content_to_responses(content: Any, what: str) -> Any:
    """Chat content of a user, system, developer or tool message as Responses content."""
    if content is None or isinstance(content, str):
        return content or ""
    return [part_to_responses(part, what) for part in mappings(content, f"content of {what}")]


def part_to_responses(part: Json, what: str) -> Json:
    kind = part.get("type")
    if kind in _TEXT:
        return {"type": "input_text", "text": part.get("text") or ""}
    if kind == "image_url":
        image = field(part, "image_url", f"an image_url part of {what}")
        image = image if isinstance(image, dict) else {"url": image}
        url, detail = image.get("url"), image.get("detail") or "auto"
        return {"type": "input_image", "image_url": url, "detail": detail}
    if kind == "file":
        return {"type": "input_file", **field(part, "file", f"a file part of {what}")}
    if kind == "video_url":
        video = field(part, "video_url", f"a video_url part of {what}")
        return {"type": "input_video", "video_url": video["url"] if isinstance(video, dict) else video}
    if kind in ("input_audio", "input_image", "input_file", "input_video"):
        return part
    raise ConfigError(f"content part of type {kind!r} in {what} cannot be sent to a Responses endpoint")
