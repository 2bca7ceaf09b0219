"""Decodes images and videos; files of an unknown format or with too many pixels are refused before decoding.

The format is recognized by the file's first bytes, never by its name or declared type. Images and animations are
decoded by Pillow, other videos by PyAV, which is imported only then. Opening reads the header; reading decodes, resizes
and frees one frame after the other. Decoders of damaged files may crash, loop and fill the memory, so the server opens
its clients' files in another process (`decoder.py`).
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from onebox.spec.errors import OneboxError, UnsupportedError, UsageError

__all__ = ["MAX_PIXELS", "Clip", "Resize", "Still", "open_clip", "open_image"]

MAX_PIXELS = 1 << 26
"""Of an image or a frame: 67 million. A small file can declare many more and fill the memory when decoded."""
MAX_FRAMES = 54_000
"""Half an hour at 30 frames per second: all frames up to the last one used are decoded."""

MAX_ANIMATION_PIXELS = 1 << 31
"""Of an animation's frames together: all of them are decoded to know how long each is shown."""

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ANIMATIONS = ("GIF", "WEBP", "PNG")
_ORIENTATION = 0x0112
"""EXIF tag of the camera's orientation; 1 is upright, and from 5 on height and width are exchanged."""
_BAND_ROWS = 256
"""Rows of an image that are converted at once."""
_DEFAULT_FRAME_MS = 100
"""Of an animation without durations, as in browsers."""


class Resize(NamedTuple):
    """The size that frames are given, and Pillow's number of the filter."""

    height: int
    width: int
    resample: int


@dataclass(frozen=True)
class Still:
    """An image that is not decoded yet."""

    height: int
    width: int
    read: Callable[[Resize], NDArray[np.uint8]]
    """Pixels [1, height, width, 3] in the given size."""


@dataclass(frozen=True)
class Clip:
    """A video whose frames are not decoded yet."""

    num_frames: int
    fps: float
    height: int
    width: int
    read: Callable[[Sequence[int], Resize], NDArray[np.uint8]]
    """Pixels [frames, height, width, 3] of the frames with these indexes, which ascend, in the given size."""


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Any error inside is the file's: decoders raise many kinds of exceptions on damaged files."""
    try:
        yield
    except OneboxError:
        raise
    except Image.DecompressionBombError:
        raise UsageError(f"The {what} has too many pixels; the limit is {MAX_PIXELS}.") from None
    except MemoryError:
        raise UsageError(f"The {what} takes too much memory to decode; send a smaller one.") from None
    except Exception as error:
        raise UsageError(f"The {what} is damaged or not what it says ({_reason(error)}).") from None


def _reason(error: Exception) -> str:
    # PyAV's messages contain an internal file name, which is left out.
    return str(getattr(error, "strerror", None) or error).rstrip(".") or type(error).__name__


def _refuse_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise UsageError(f"The picture is {width} x {height} pixels, so there is nothing to see.")
    if width * height > MAX_PIXELS:
        raise UsageError(f"The picture is {width} x {height} pixels, {width * height}; the limit is {MAX_PIXELS}.")


def _resized(frames: Iterator[Image.Image], num_frames: int, resize: Resize) -> NDArray[np.uint8]:
    """The frames as pixels [frames, height, width, 3], each decoded, resized and freed in turn."""
    pixels = np.empty((num_frames, resize.height, resize.width, 3), dtype=np.uint8)
    num_filled = 0
    for frame in frames:
        small = _to_rgb(frame).resize((resize.width, resize.height), Image.Resampling(resize.resample))
        pixels[num_filled] = np.asarray(small)
        num_filled += 1
    if num_filled != num_frames:
        raise UsageError(f"The video has {num_filled} of the {num_frames} frames that it should have.")
    return pixels


# Images.


def open_image(data: bytes) -> Still:
    """The image, only its header read; of an animation its first frame."""
    with _reading("image"):
        image = _identified(data, _IMAGE_FORMATS, f"image of a known format; send one of {', '.join(_IMAGE_FORMATS)}")
        # Without EXIF in the header, getexif would decode the whole image.
        orientation = image.getexif().get(_ORIENTATION, 1) if "exif" in image.info else 1
        is_turned = orientation in range(5, 9)
    height, width = (image.width, image.height) if is_turned else (image.height, image.width)

    def read(resize: Resize) -> NDArray[np.uint8]:
        with _reading("image"):
            upright = ImageOps.exif_transpose(image) if orientation != 1 else image
            return _resized(iter([upright]), 1, resize)

    return Still(height, width, read)


def _identified(data: bytes, formats: tuple[str, ...], wanted: str) -> ImageFile:
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise UsageError(f"It is no {wanted}.") from None
    _refuse_size(image.width, image.height)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """The decoded image in three channels, on white where it is transparent."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Grey of 16 bits, which Pillow would cut off at 255.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgb = Image.new("RGB", image.size)
    # In bands: whole, each step would take four bytes a pixel.
    for top in range(0, image.height, _BAND_ROWS):
        band = image.crop((0, top, image.width, min(top + _BAND_ROWS, image.height)))
        band.info = image.info
        rgba = band.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        rgb.paste(Image.alpha_composite(white, rgba).convert("RGB"), (0, top))
    return rgb


# Videos.


def open_clip(data: bytes) -> Clip:
    """The video: an animation (GIF, WebP, PNG), or an MP4, QuickTime, Matroska, WebM or AVI file."""
    container = _container(data)
    with _reading("video"):
        return _open_container(data, container) if container else _open_animation(data)


def _container(data: bytes) -> str | None:
    """FFmpeg's name of the container. Always given: FFmpeg's own detection would follow playlists to other files."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else None


def _clip(num_frames: int, fps: float, first: Image.Image, read: Callable[..., Iterator[Image.Image]]) -> Clip:
    if not 0 < fps < math.inf:
        raise UsageError("The video does not say how many frames a second it has.")

    def read_resized(places: Sequence[int], resize: Resize) -> NDArray[np.uint8]:
        with _reading("video"):
            return _resized(read(places), len(places), resize)

    return Clip(num_frames, fps, first.height, first.width, read_resized)


def _refuse_frames(num_frames: int) -> None:
    if num_frames > MAX_FRAMES:
        raise UsageError(f"The video has {num_frames} frames; the limit is {MAX_FRAMES}.")


def _open_animation(data: bytes) -> Clip:
    kinds = "MP4, QuickTime, Matroska, WebM, AVI, or an animated GIF, WebP or PNG"
    image = _identified(data, _ANIMATIONS, f"video of a known format; send {kinds}")
    count = getattr(image, "n_frames", 1)
    _refuse_frames(count)
    num_pixels = count * image.width * image.height
    if num_pixels > MAX_ANIMATION_PIXELS:
        raise UsageError(
            f"The animation has {count} frames of {image.width} x {image.height} pixels, {num_pixels} together; the "
            f"limit is {MAX_ANIMATION_PIXELS}."
        )
    # Each frame has its own duration, so all are visited.
    duration_ms = sum(frame.info.get("duration") or _DEFAULT_FRAME_MS for frame in _frames(image, range(count)))
    return _clip(count, 1000 * count / duration_ms, image, partial(_frames, image))


def _frames(image: Image.Image, places: Sequence[int]) -> Iterator[Image.Image]:
    for place in places:
        image.seek(place)
        _refuse_size(image.width, image.height)
        image.load()
        yield image


def _open_container(data: bytes, container: str) -> Clip:
    with _opened(data, container) as (file, stream):
        # Counted, since the number in the file's header may be missing or wrong.
        num_frames = sum(1 for packet in file.demux(stream) if packet.size)
        _refuse_frames(num_frames)
        fps = float(stream.average_rate or 0)
    first = next(_decoded(data, container, [0]))
    return _clip(num_frames, fps, first, partial(_decoded, data, container))


@contextmanager
def _opened(data: bytes, container: str) -> Iterator[tuple[Any, Any]]:
    """PyAV's file and its first video stream."""
    try:
        import av
    except ImportError:
        raise UnsupportedError(
            "Videos other than animations are read by PyAV, which is not installed where this server runs "
            "(`pip install 'onebox[video]'`); send frames as images or an animated GIF or WebP."
        ) from None
    # Its tags may be in any encoding and are not used.
    with av.open(io.BytesIO(data), format=container, metadata_errors="replace") as file:
        stream = next(iter(file.streams.video), None)
        if stream is None or stream.codec_context is None:
            raise UsageError("The file has no video stream that can be read here.")
        _refuse_size(stream.codec_context.width, stream.codec_context.height)
        # Frames may be larger than the header declares.
        stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
        yield file, stream


def _decoded(data: bytes, container: str, places: Sequence[int]) -> Iterator[Image.Image]:
    waiting = iter(places)
    wanted = next(waiting, None)
    with _opened(data, container) as (file, stream):
        for place, frame in enumerate(file.decode(stream)):
            if place != wanted:
                continue
            _refuse_size(frame.width, frame.height)
            yield frame.to_image().rotate(frame.rotation, expand=True)
            wanted = next(waiting, None)
            if wanted is None:
                return
    raise UsageError(f"The video ends before its frame {wanted}.")
