"""The images and videos of a chat: counted, fetched, checked against the context, decoded.

Limits are checked from cheap to expensive: number, bytes, pixels and tokens (known from the file headers). Decoding
comes last, when the whole prompt is known to fit: one picture after the other, in processes of its own (`decoding.py`).
Requests with many pictures and those with few take turns.
"""

import asyncio
import math
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onebox.engine.api import ContextTooLongError, Pictures, Vision
from onebox.server.budget import ByteBudget
from onebox.server.decoding import DecoderProcesses
from onebox.server.errors import FieldError, ServerBusyError
from onebox.server.fetch import Allowance, FetchLimits, fetch
from onebox.server.pool import WorkPool
from onebox.spec.errors import OneboxError, UnsupportedError, UsageError
from onebox.spec.model import read_config
from onebox.text.patches import MediaKind, Picture, PictureReader

__all__ = ["Media", "MediaFiles", "MediaLimits", "MediaPart", "OpenedMedia", "media_parts"]

_LOW_DETAIL_PIXELS = 512 * 512
"""Of an image whose detail is low, as in the OpenAI API."""
FETCHES_AT_ONCE = 4
"""Of one request."""
MAX_PATCHES_BYTES = 2 << 30
"""Of the patches of all requests together; a token's are 24 KiB in the published models."""

SMALL_FILE_BYTES = 1 << 20
"""Headers of larger files are read apart: one of many parts takes long, whatever its pixels."""
SMALL_PIXELS = 1 << 22
"""Images up to this size, 4 million pixels, are decoded in a fraction of a second."""

# Shared by all: what they bound is this process's. What is quick does not wait for what is slow.
_headers_pool = WorkPool("the headers of images", num_threads=1, max_waiting=256)
_long_headers_pool = WorkPool("the headers of large files", num_threads=2, max_waiting=64)
_small_pool = WorkPool("the decoding of images", num_threads=1, max_waiting=256)
_large_pool = WorkPool("the decoding of large images", num_threads=2, max_waiting=64)
_videos_pool = WorkPool("the decoding of videos", num_threads=2, max_waiting=16)
_decoders = DecoderProcesses()
_files_budget = ByteBudget(512 << 20, "The files of images and videos")
_patches_budget = ByteBudget(MAX_PATCHES_BYTES, "The pictures")


@dataclass(frozen=True)
class MediaLimits:
    """Limits of one request."""

    max_images: int = 16
    max_videos: int = 2
    fetch: FetchLimits = field(default_factory=FetchLimits)
    max_pixels: int = 1 << 28
    """Of all images and of one frame of each video, as they come: 268 million."""

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

    @property
    def file(self) -> tuple[MediaKind, str, int | None]:
        """What its picture depends on."""
        return self.kind, self.url, self.max_pixels


@dataclass(frozen=True)
class MediaFiles:
    """The files of one request: each is fetched and opened once, however often a prompt of it is built."""

    allowance: Allowance
    opened: dict[tuple[MediaKind, str, int | None], Picture] = field(default_factory=dict)
    """By kind, URL and limit of pixels."""


@dataclass(frozen=True)
class OpenedMedia:
    """A chat's images and videos, their headers read: what the length of its prompt takes."""

    encode: Callable[[str, Callable[[str], tuple[int, ...]]], tuple[int, ...]]
    """The rendered prompt's token ids, with one pad token for each embedding; the second argument encodes text."""
    read: Callable[[], Awaitable[Vision]]
    """Decodes them: their patches."""


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

    @contextmanager
    def files(self) -> Iterator[MediaFiles]:
        """Of one request; they count as long as the block is not left."""
        with _files_budget.hold() as held:
            yield MediaFiles(Allowance(self._limits.fetch, held))

    async def open_parts(self, parts: Sequence[MediaPart], max_tokens: int, files: MediaFiles) -> OpenedMedia | None:
        """Fetches, and reads headers; None where there are no parts. `max_tokens` is the size of the context."""
        if not parts:
            return None
        if isinstance(self._reader, OneboxError):
            raise FieldError(str(self._reader), parts[0].param)
        self._refuse_too_many(parts)
        reader = self._reader
        pictures = await self._open(reader, parts, files)
        self._refuse_too_large(parts, pictures, max_tokens)

        async def read() -> Vision:
            return Vision(await _read("image", parts, pictures), await _read("video", parts, pictures))

        return OpenedMedia(lambda text, encode: reader.encode(text, pictures, encode), read)

    async def _open(self, reader: PictureReader, parts: Sequence[MediaPart], files: MediaFiles) -> list[Picture]:
        """Fetches those that are new, a few at once, then opens one after the other."""
        new = {part.file: part for part in parts if part.file not in files.opened}
        turns = asyncio.Semaphore(FETCHES_AT_ONCE)
        tasks = [asyncio.create_task(self._fetch(part, files.allowance, turns)) for part in new.values()]
        try:
            fetched = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        for part, data in zip(new.values(), fetched, strict=True):
            with _naming(part):
                pool = _headers_pool if len(data) <= SMALL_FILE_BYTES else _long_headers_pool
                pool = pool if part.kind == "image" else _videos_pool
                picture = await pool.run(reader.open, part.kind, data, part.max_pixels, _decoders)
            files.opened[part.file] = picture
        return [files.opened[part.file] for part in parts]

    def _refuse_too_many(self, parts: Sequence[MediaPart]) -> None:
        for kind, limit in (("image", self._limits.max_images), ("video", self._limits.max_videos)):
            found = [part for part in parts if part.kind == kind]
            if len(found) > limit:
                raise FieldError(
                    f"The request has {len(found)} {kind}s; this server takes at most {limit} (--limit-mm-per-prompt).",
                    found[limit].param,
                )

    def _refuse_too_large(self, parts: Sequence[MediaPart], pictures: Sequence[Picture], max_tokens: int) -> None:
        num_pixels, num_tokens = 0, sum(picture.num_tokens for picture in pictures)
        for part, picture in zip(parts, pictures, strict=True):
            num_pixels += picture.num_source_pixels
            if num_pixels > self._limits.max_pixels:
                raise FieldError(
                    f"The request's images and videos have more than {self._limits.max_pixels} pixels together; send "
                    "fewer or smaller ones.",
                    part.param,
                )
        if num_tokens >= max_tokens:
            raise ContextTooLongError(
                f"The images and videos have {num_tokens} tokens and the context holds {max_tokens}, answer included; "
                "send fewer or smaller ones."
            )
        num_bytes = sum(map(_patches_bytes, pictures))
        if num_bytes > MAX_PATCHES_BYTES:
            raise FieldError(
                f"The images and videos take {num_bytes} bytes as patches; the limit is {MAX_PATCHES_BYTES}, so send "
                "fewer or smaller ones.",
                parts[-1].param,
            )

    async def _fetch(self, part: MediaPart, allowance: Allowance, turns: asyncio.Semaphore) -> bytes:
        with _naming(part):
            async with turns:
                return await fetch(part.kind, part.url, self._limits.fetch, allowance)


def _patches_bytes(picture: Picture) -> int:
    return math.prod(picture.shape) * np.dtype(np.float32).itemsize


async def _read(kind: MediaKind, parts: Sequence[MediaPart], pictures: Sequence[Picture]) -> Pictures | None:
    """All of one kind, decoded one after the other into one array, which counts until it is freed."""
    chosen = [(part, picture) for part, picture in zip(parts, pictures, strict=True) if picture.kind == kind]
    if not chosen:
        return None
    num_bytes = sum(_patches_bytes(picture) for _, picture in chosen)
    _patches_budget.take(num_bytes)
    num_rows = sum(picture.shape[0] for _, picture in chosen)
    joined = np.empty((num_rows, chosen[0][1].shape[1]), dtype=np.float32)
    weakref.finalize(joined, _patches_budget.give_back, num_bytes)
    start = 0
    for part, picture in chosen:
        with _naming(part):
            await _reading_pool(picture).run(_read_into, joined[start : start + picture.shape[0]], picture)
        start += picture.shape[0]
    return Pictures(joined, tuple(picture.grid for _, picture in chosen))


def _reading_pool(picture: Picture) -> WorkPool:
    if picture.kind == "video":
        return _videos_pool
    return _small_pool if picture.num_source_pixels <= SMALL_PIXELS else _large_pool


def _read_into(target: NDArray[np.float32], picture: Picture) -> None:
    target[:] = picture.read()


@contextmanager
def _naming(part: MediaPart) -> Iterator[None]:
    """A refusal inside the block names the part's field."""
    try:
        yield
    except ServerBusyError:
        raise
    except OneboxError as error:
        raise FieldError(str(error), part.param) from None
