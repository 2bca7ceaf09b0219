"""The images and videos of a chat: counted, fetched, checked against the context, decoded.

Limits are checked from cheap to expensive: number, bytes, tokens (known from the file headers); pixels are decoded
last.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.engine.api import ContextTooLongError, Pictures, Vision
from onebox.server.errors import FieldError
from onebox.server.fetch import Allowance, FetchLimits, fetch
from onebox.spec.errors import OneboxError, UnsupportedError, UsageError
from onebox.spec.model import read_config
from onebox.text.patches import MediaKind, Picture, PictureReader

__all__ = ["LoadedMedia", "Media", "MediaLimits", "MediaPart", "media_parts"]

_LOW_DETAIL_PIXELS = 512 * 512
"""Of an image whose detail is low, as in the OpenAI API."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits of one request."""

    max_images: int = 16
    max_videos: int = 2
    fetch: FetchLimits = field(default_factory=FetchLimits)

    @classmethod
    def of_counts(cls, counts: Mapping[str, Any], fetch: FetchLimits) -> "MediaLimits":
        """By --limit-mm-per-prompt: {"image": 16, "video": 2}; the defaults for what it leaves out."""
        for name, count in counts.items():
            is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 0
            if name not in ("image", "video") or not is_count:
                raise UsageError(
                    f"--limit-mm-per-prompt sets {name!r} to {count!r}; it takes image and video, numbers from 0 up."
                )
        return cls(**{f"max_{name}s": count for name, count in counts.items()}, fetch=fetch)


class MediaPart(NamedTuple):
    """One image or video of a message."""

    kind: MediaKind
    url: str
    param: str
    """The field's path in the request."""
    max_pixels: int | None = None


@dataclass(frozen=True)
class LoadedMedia:
    """A chat's images and videos: their patches, and how a prompt that contains them is encoded."""

    vision: Vision
    encode: Callable[[str, Callable[[str], tuple[int, ...]]], tuple[int, ...]]
    """The rendered prompt's token ids, with one pad token for each embedding; the second argument encodes text."""


def media_parts(messages: Sequence[Mapping[str, Any]]) -> list[MediaPart]:
    """The parts of type image_url and video_url in messages of OpenAI's shape, in order."""
    found = []
    for place, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] in ("image_url", "video_url"):
                found.append(_media_part(part, f"messages.{place}.content.{number}"))
    return found


def _media_part(part: Mapping[str, Any], place: str) -> MediaPart:
    name = part["type"]
    source = part[name]
    max_pixels = _LOW_DETAIL_PIXELS if source.get("detail") == "low" else None
    return MediaPart("image" if name == "image_url" else "video", source["url"], f"{place}.{name}.url", max_pixels)


class Media:
    """Loads images and videos for one model; without a processor it refuses them all, with the reason."""

    def __init__(self, reader: PictureReader | OneboxError, limits: MediaLimits | None = None) -> None:
        self._reader = reader
        self._limits = limits or MediaLimits()

    @classmethod
    def text_only(cls) -> "Media":
        return cls(UnsupportedError("The model runs without a vision tower: it reads text only; send no pictures."))

    @classmethod
    def open(cls, directory: Path, limits: MediaLimits | None = None, *, has_tower: bool) -> "Media":
        """For a checkpoint; `has_tower` is whether its vision tower is loaded."""
        if not has_tower:
            return cls.text_only()
        try:
            return cls(PictureReader.load(directory, read_config(directory)), limits)
        except OneboxError as error:
            return cls(error)

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """What a message may contain besides text."""
        return () if isinstance(self._reader, OneboxError) else self._reader.kinds

    async def load(self, parts: Sequence[MediaPart], max_tokens: int) -> LoadedMedia | None:
        """Fetches and decodes; None where there are no parts. `max_tokens` is the size of the context."""
        if not parts:
            return None
        if isinstance(self._reader, OneboxError):
            raise FieldError(str(self._reader), parts[0].param)
        self._refuse_too_many(parts)
        allowance = Allowance(self._limits.fetch)
        tasks = [asyncio.create_task(self._fetch(part, allowance)) for part in parts]
        try:
            files = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return await asyncio.to_thread(_read, self._reader, parts, files, max_tokens)

    def _refuse_too_many(self, parts: Sequence[MediaPart]) -> None:
        for kind, limit in (("image", self._limits.max_images), ("video", self._limits.max_videos)):
            found = [part for part in parts if part.kind == kind]
            if len(found) > limit:
                raise FieldError(
                    f"The request has {len(found)} {kind}s; this server takes at most {limit} (--limit-mm-per-prompt).",
                    found[limit].param,
                )

    async def _fetch(self, part: MediaPart, allowance: Allowance) -> bytes:
        with _naming(part):
            return await fetch(part.kind, part.url, self._limits.fetch, allowance)


def _read(reader: PictureReader, parts: Sequence[MediaPart], files: Sequence[bytes], max_tokens: int) -> LoadedMedia:
    pictures, num_tokens = [], 0
    for part, data in zip(parts, files, strict=True):
        with _naming(part):
            pictures.append(reader.open(part.kind, data, part.max_pixels))
        num_tokens += pictures[-1].num_tokens
    if num_tokens >= max_tokens:
        raise ContextTooLongError(
            f"The images and videos have {num_tokens} tokens and the context holds {max_tokens}, answer included; send "
            "fewer or smaller ones."
        )
    patches = []
    for part, picture in zip(parts, pictures, strict=True):
        with _naming(part):
            patches.append(picture.read())
    vision = Vision(_joined("image", pictures, patches), _joined("video", pictures, patches))
    return LoadedMedia(vision, lambda text, encode: reader.encode(text, pictures, encode))


@contextmanager
def _naming(part: MediaPart) -> Iterator[None]:
    """A refusal inside the block names the part's field."""
    try:
        yield
    except OneboxError as error:
        raise FieldError(str(error), part.param) from None


def _joined(kind: MediaKind, pictures: Sequence[Picture], patches: Sequence[NDArray[np.float32]]) -> Pictures | None:
    """All of one kind, concatenated."""
    chosen = [place for place, picture in enumerate(pictures) if picture.kind == kind]
    if not chosen:
        return None
    joined = np.concatenate([patches[place] for place in chosen])
    return Pictures(joined, tuple(pictures[place].grid for place in chosen))
