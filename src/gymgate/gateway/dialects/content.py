"""Content parts as Responses and as chat-completions write them, and the reasoning beside them.

Parts are text, images, files, audio and video. Reasoning stands under several names in chat messages, and in items of its
own in Responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from gymgate.core.errors import ConfigError
from gymgate.gateway.dialects.reading import Json, field, joined_text, mappings, without_none

ReasoningStyle = tuple[str, ...]
"""Fields of a chat message that carry reasoning; `THINK_TAGS` stands for `<think>` in the content."""

BOTH_FIELDS: ReasoningStyle = ("reasoning_content", "reasoning")
THINK_TAGS: ReasoningStyle = ("<think>",)
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_FIELDS = ("reasoning_content", "reasoning")
_TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def content_to_chat(content: Any, what: str) -> Any:
    """Translate Responses content (a string or a list of parts) to chat content; `ConfigError` for a part chat lacks."""
    return _translate(content, what, _part_to_chat)


def _part_to_chat(part: Json, what: str) -> Json:
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
    """Translate chat content of a user, system, developer or tool message to Responses content."""
    return _translate(content, what, _part_to_responses)


def _translate(content: Any, what: str, part_of: Callable[[Json, str], Json]) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    return [part_of(part, what) for part in mappings(content, f"content of {what}")]


def _part_to_responses(part: Json, what: str) -> Json:
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


def assistant_parts(content: Any) -> list[Json]:
    """Return the parts of an assistant's content. `ConfigError` for one that is neither text nor a refusal, as in NeMo Gym."""
    parts = mappings(content, "content of an assistant message")
    for part in parts:
        if part.get("type") not in (*_TEXT, "refusal") and not isinstance(part.get("text"), str):
            raise ConfigError(
                f"content part of type {part.get('type')!r} in an assistant message, which holds text and refusals only"
            )
    return parts


def text_and_refusal(content: Any) -> tuple[str, str]:
    """Return the text and the refusal in content. Empty and missing content are the same, however text is cut into parts."""
    if content is None or isinstance(content, str):
        return content or "", ""
    refusals = (part.get("refusal") for part in content if isinstance(part, dict))
    return joined_text(content), "".join(refusal for refusal in refusals if isinstance(refusal, str))


def joined_system(messages: Any) -> list[Any] | None:
    """Return chat messages with all system and developer messages as one at their start; `None` if they are so."""
    parts = mappings(messages, "messages")
    system = [part for part in parts if part.get("role") in ("system", "developer")]
    if not system or (len(system) == 1 and parts[0] is system[0]):
        return None
    contents = [part.get("content") or "" for part in system]
    if all(isinstance(content, str) for content in contents):
        content: Any = "\n\n".join(contents)
    else:
        as_parts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents)
        content = [part for one in as_parts for part in one]
    rest = [part for part in parts if part.get("role") not in ("system", "developer")]
    return [{**system[0], "content": content}, *rest]


def message_reasoning(message: Json) -> tuple[str, ReasoningStyle | None]:
    """Return the reasoning of a chat message that has a field for it, and the fields that carry it.

    `reasoning_content`: vLLM before 0.16, SGLang, DeepSeek, Qwen; `reasoning`: vLLM, OpenRouter;
    `reasoning_details`: OpenRouter's and MiniMax's list.
    """
    fields = tuple(name for name in _FIELDS if isinstance(message.get(name), str) and message[name])
    if fields:
        return message[fields[0]], fields
    details = message.get("reasoning_details")
    if isinstance(details, list):
        texts = [d.get("text") or d.get("summary") for d in details if isinstance(d, dict)]
        if text := joined_text(texts, "\n"):
            return text, None
    return "", None


def split_think_tags(content: str) -> tuple[list[str], str]:
    """Split off the texts inside complete `<think>` tags from the content, as NeMo Gym's model server does."""
    if "<think>" not in content:
        return [], content
    # No further than the last end: looking for one behind each of a thousand beginnings takes minutes.
    end = content.rfind("</think>") + len("</think>")
    complete, rest = content[:end], content[end:]
    return _THINK.findall(complete), _THINK.sub("", complete) + rest


def set_reasoning(message: Json, reasoning: str, style: ReasoningStyle) -> None:
    """Put reasoning into an assistant's chat message, in the style of its endpoint."""
    if style == THINK_TAGS:
        message["content"] = f"<think>{reasoning}</think>{message.get('content') or ''}"
        return
    for name in style:
        message[name] = reasoning


def item_reasoning(item: Json) -> str:
    """Return the text of a Responses reasoning item: the reasoning if it is there, else its summary."""
    content = joined_text(item.get("content") or [], "\n\n")
    return content or joined_text(item.get("summary") or [], "\n\n")


def said_in(items: Iterable[Json]) -> tuple[str, str, str]:
    """Return the text, the refusal and the reasoning in Responses items."""
    texts, refusals, thoughts = [], [], []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message":
            text, refusal = text_and_refusal(item.get("content"))
            texts.append(text)
            refusals.append(refusal)
        elif kind == "reasoning":
            thoughts.append(item_reasoning(item))
    return "".join(texts), "".join(refusals), joined_text(thoughts, "\n\n")
