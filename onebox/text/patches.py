"""Images and videos to patches, and their pad tokens in a prompt, equal to those of the family's own processor.

Sizes, patches and the sampling of videos follow the checkpoint's processor files. `PictureReader.open` reads a file's
header alone, so that the number of tokens is known before decoding; `Picture.read` then makes the patches, and
`PictureReader.encode` the token ids of a rendered prompt, with one pad token for each embedding. A picture is an image
or a video.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onebox.spec.errors import MismatchError, UnreadableError, UnsupportedError, UsageError
from onebox.spec.model import ModelSpec, VisionSpec, read_json
from onebox.text import images as images_here
from onebox.text.images import Clip, Resize, Still

__all__ = ["MediaKind", "Picture", "PictureFiles", "PictureReader"]

MediaKind = Literal["image", "video"]
Grid = tuple[int, int, int]


class PictureFiles(Protocol):
    """What opens files: `images.py` in this process, or a process that does the same."""

    def open_image(self, data: bytes) -> Still: ...
    def open_clip(self, data: bytes) -> Clip: ...


_MAX_ASPECT = 200
"""Limit of longer to shorter side, as in the family's processor."""


@dataclass(frozen=True)
class Picture:
    """One image or video whose number of tokens is known and whose pixels are not decoded yet."""

    kind: MediaKind
    grid: Grid
    """Patches in time, height and width."""
    num_tokens_per_step: int
    """Embeddings, and so pad tokens, of each step in time; an image has one step."""
    timestamps: tuple[float, ...]
    """Of a video's steps in time, in seconds; an image has none."""
    read: Callable[[], NDArray[np.float32]]
    """Decodes it: patches of `shape`."""
    shape: tuple[int, int] = (0, 0)
    """[grid's product, in_channels * temporal_patch_size * patch_size^2]."""
    num_source_pixels: int = 0
    """Of the file's image, or of one frame of its video."""

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.num_tokens_per_step


# From the checkpoint's files.

_READ = {"size", "min_pixels", "max_pixels", "image_mean", "image_std", "rescale_factor", "resample"}
_READ |= {"patch_size", "temporal_patch_size", "merge_size", "fps", "min_frames", "max_frames"}
_FIXED: dict[str, Any] = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
_FIXED |= {"do_sample_frames": True, "do_center_crop": False, "do_pad": False, "cap_pixels_per_frame": False}
_FIXED |= {"data_format": "channels_first"}
_HARMLESS = {"processor_class", "image_processor_type", "video_processor_type", "default_to_square", "return_metadata"}


@dataclass(frozen=True)
class _Cutting:
    """How pixels become patches."""

    min_pixels: int
    max_pixels: int
    """Bounds of an image's pixels; of a video's, all frames together."""
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    values: NDArray[np.float32]
    """[3, 256]: what the tower is given for each value of each channel."""
    resample: Image.Resampling

    @property
    def factor(self) -> int:
        """Both sides of what is cut are multiples of it."""
        return self.patch_size * self.merge_size

    @classmethod
    def read(cls, config: Mapping[str, Any], file: str) -> "_Cutting":
        _refuse_unknown(config, file)
        size = config.get("size") or {}
        try:
            # In float64 until scaled and float32 from there on, as the family's processor computes it.
            scaled = (np.arange(256) * float(config.get("rescale_factor") or 1 / 255)).astype(np.float32)
            mean, std = (np.array(config[key], dtype=np.float32)[:, None] for key in ("image_mean", "image_std"))
            return cls(
                min_pixels=int(config.get("min_pixels") or size["shortest_edge"]),
                max_pixels=int(config.get("max_pixels") or size["longest_edge"]),
                patch_size=int(config["patch_size"]),
                temporal_patch_size=int(config["temporal_patch_size"]),
                merge_size=int(config["merge_size"]),
                values=np.broadcast_to((scaled - mean) / std, (3, 256)),
                resample=Image.Resampling(config.get("resample") or Image.Resampling.BICUBIC),
            )
        except KeyError as error:
            raise UnreadableError(f"{file} has no {error.args[0]}, which says how pictures become patches.") from None
        except (TypeError, ValueError) as error:
            raise UnreadableError(f"{file} does not say how pictures become patches ({error}).") from None


def _refuse_unknown(config: Mapping[str, Any], file: str) -> None:
    for key, value in config.items():
        is_fixed = key in _FIXED and value == _FIXED[key]
        if value is not None and key not in _READ | _HARMLESS and not is_fixed:
            raise UnsupportedError(f"{file} sets {key} to {value!r}, which onebox cannot honour; remove it.")


def _config(directory: Path, name: str, section: str) -> dict[str, Any] | None:
    """The separate file, or the section of processor_config.json, where newer tools write it."""
    if (directory / name).exists():
        return dict(read_json(directory / name))
    if (directory / "processor_config.json").exists():
        found = read_json(directory / "processor_config.json").get(section)
        return dict(found) if isinstance(found, dict) else None
    return None


@dataclass(frozen=True)
class _Sampling:
    """Which frames of a video are used."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "_Sampling":
        given = {key: config[key] for key in ("fps", "min_frames", "max_frames") if config.get(key) is not None}
        return cls(**given)

    def frames(self, clip: Clip) -> list[int]:
        """Their indexes, in order: evenly spread from the first to the last."""
        wanted = max(int(clip.num_frames / clip.fps * self.fps), self.min_frames)
        count = min(wanted, self.max_frames, clip.num_frames)
        places: list[int] = np.linspace(0, clip.num_frames - 1, count).round().astype(int).tolist()
        return places


# One reader for a checkpoint.


class PictureReader:
    """Opens images and videos for one checkpoint's vision tower."""

    def __init__(self, spec: ModelSpec, images: _Cutting, videos: _Cutting | None, sampling: _Sampling) -> None:
        self._spec = spec
        self._images = images
        self._videos = videos
        self._sampling = sampling

    @classmethod
    def load(cls, directory: Path, spec: ModelSpec) -> "PictureReader":
        """By the checkpoint's processor files, which must fit the tower of its config.json."""
        if spec.vision is None:
            raise UnsupportedError("config.json has no vision_config: this model reads text only; send no pictures.")
        name, video_name = "preprocessor_config.json", "video_preprocessor_config.json"
        config = _config(directory, name, "image_processor")
        if config is None:
            raise UnsupportedError(
                f"This checkpoint has no {name}, which says how images become patches: it reads text only; send no "
                "pictures."
            )
        images = _Cutting.read(config, name)
        _refuse_other_tower(images, spec.vision, name)
        video_config = _config(directory, video_name, "video_processor")
        if video_config is None:
            return cls(spec, images, None, _Sampling())
        videos = _Cutting.read(video_config, video_name)
        _refuse_other_tower(videos, spec.vision, video_name)
        return cls(spec, images, videos, _Sampling.read(video_config))

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds that it opens."""
        return ("image", "video") if self._videos else ("image",)

    def open(
        self, kind: MediaKind, data: bytes, max_pixels: int | None = None, files: PictureFiles = images_here
    ) -> Picture:
        """The picture in a file's bytes, which must be of the kind; `max_pixels` limits an image further."""
        return self._open_image(data, max_pixels, files) if kind == "image" else self._open_video(data, files)

    def encode(
        self, text: str, pictures: Sequence[Picture], encode_text: Callable[[str], tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Token ids of a rendered prompt, in which each picture left one pad token, in the order of `pictures`.

        An image's pad becomes as many as it has embeddings. A video's becomes a timestamp and a row of pads for each
        step in time; timestamps are written before the text is encoded, since the neighbouring text decides their
        tokens.
        """
        waiting = {kind: [picture for picture in pictures if picture.kind == kind] for kind in _PADS}
        for kind, pad in _PADS.items():
            if text.count(pad) != len(waiting[kind]):
                raise UsageError(
                    f"The prompt has {text.count(pad)} places for {len(waiting[kind])} {kind}s; {pad} marks such a "
                    "place, so remove it from the text."
                )
        videos = iter(waiting["video"])
        token_ids = encode_text(_VIDEO_PLACE.sub(lambda _: _steps_text(next(videos)), text))
        counts = {
            self._spec.image_token_id: (picture.num_tokens for picture in waiting["image"]),
            self._spec.video_token_id: (v.num_tokens_per_step for v in waiting["video"] for _ in v.timestamps),
        }
        return tuple(_repeated(token_ids, counts))

    def _open_image(self, data: bytes, max_pixels: int | None, files: PictureFiles) -> Picture:
        cutting, image = self._images, files.open_image(data)
        bound = min(cutting.max_pixels, max_pixels or cutting.max_pixels)
        height, width = _image_size(image.height, image.width, cutting.factor, cutting.min_pixels, bound)

        def read() -> NDArray[np.float32]:
            return _cut(cutting, image.read(Resize(height, width, cutting.resample)))

        return _picture("image", cutting, image.height * image.width, (1, height, width), (), read)

    def _open_video(self, data: bytes, files: PictureFiles) -> Picture:
        cutting = self._videos
        if cutting is None:
            raise UnsupportedError("This checkpoint has no video_preprocessor_config.json: it reads no videos.")
        clip = files.open_clip(data)
        places = self._sampling.frames(clip)
        if len(places) < cutting.temporal_patch_size:
            raise UsageError(f"The video has {clip.num_frames} frame; send it as an image.")
        height, width = _video_size(clip.height, clip.width, len(places), cutting)

        def read() -> NDArray[np.float32]:
            return _cut(cutting, clip.read(places, Resize(height, width, cutting.resample)))

        seconds = [place / clip.fps for place in _filled_up(places, cutting.temporal_patch_size)]
        pairs = zip(*(iter(seconds),) * cutting.temporal_patch_size, strict=True)
        timestamps = tuple((step[0] + step[-1]) / 2 for step in pairs)
        num_pixels = clip.height * clip.width
        return _picture("video", cutting, num_pixels, (len(timestamps), height, width), timestamps, read)


def _refuse_other_tower(cutting: _Cutting, vision: VisionSpec, file: str) -> None:
    names = (("patch_size",) * 2, ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size"))
    for ours, theirs in names:
        if getattr(cutting, ours) != getattr(vision, theirs):
            raise MismatchError(
                f"{file}: {ours} is {getattr(cutting, ours)} and config.json's vision_config.{theirs} is "
                f"{getattr(vision, theirs)}; they must be equal."
            )


def _picture(
    kind: MediaKind,
    cutting: _Cutting,
    num_source_pixels: int,
    pixels: tuple[int, int, int],
    timestamps: tuple[float, ...],
    read: Callable[[], NDArray[np.float32]],
) -> Picture:
    """`pixels` are steps in time, and height and width in pixels."""
    steps, height, width = pixels
    grid = (steps, height // cutting.patch_size, width // cutting.patch_size)
    patch_values = 3 * cutting.temporal_patch_size * cutting.patch_size**2
    num_tokens_per_step = grid[1] * grid[2] // cutting.merge_size**2
    return Picture(
        kind, grid, num_tokens_per_step, timestamps, read, (math.prod(grid), patch_values), num_source_pixels
    )


# Sizes, as the family's processor computes them.


def _image_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) near the image's own, multiples of `factor`, within the bounds, of about the same shape."""
    return _bounded_size(height, width, factor, (1, 1), min_pixels, max_pixels)


def _video_size(height: int, width: int, num_frames: int, cutting: _Cutting) -> tuple[int, int]:
    """The same of each frame, where the bounds are those of all frames together."""
    factor, per_step = cutting.factor, cutting.temporal_patch_size
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    counts = (num_frames, round(num_frames / per_step) * per_step)
    return _bounded_size(height, width, factor, counts, cutting.min_pixels, cutting.max_pixels)


def _bounded_size(
    height: int, width: int, factor: int, counts: tuple[int, int], min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """`counts` are the frames that come and the frames that are cut; the family's processor uses both."""
    if max(height, width) > _MAX_ASPECT * min(height, width):
        raise UsageError(f"It is {width} x {height} pixels; one side may be at most {_MAX_ASPECT} times the other.")
    num_frames, num_cut = counts
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if num_cut * new_height * new_width > max_pixels:
        shrink = math.sqrt((num_frames * height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif num_cut * new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


# Pixels.


def _filled_up(items: Sequence[Any], multiple: int) -> list[Any]:
    """The last one repeated until there are a multiple."""
    return [*items, *[items[-1]] * (-len(items) % multiple)]


def _cut(cutting: _Cutting, frames: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Patches of pixels [frames, height, width, 3].

    Squares of merged patches stay together, a patch is channel by channel.
    """
    patch, merge, per_step = cutting.patch_size, cutting.merge_size, cutting.temporal_patch_size
    stack = frames[_filled_up(range(len(frames)), per_step)]
    num_frames, height, width, channels = stack.shape
    rows, columns = height // cutting.factor, width // cutting.factor
    split = stack.reshape(num_frames // per_step, per_step, rows, merge, patch, columns, merge, patch, channels)
    # Step, row and column of the square, row and column in it, channel, frame of the step, row and column of the pixel.
    ordered = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    patches = np.empty(ordered.shape, dtype=np.float32)
    for channel in range(channels):
        patches[:, :, :, :, :, channel] = cutting.values[channel][ordered[:, :, :, :, :, channel]]
    return patches.reshape(-1, channels * per_step * patch * patch)


# Pad tokens in the prompt.

_START, _END = "<|vision_start|>", "<|vision_end|>"
_PADS: dict[MediaKind, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
# Each step has its own marks, so the template's pair is removed, as in the family's processor.
_VIDEO_PLACE = re.compile(rf"{re.escape(_START + _PADS['video'] + _END)}|{re.escape(_PADS['video'])}")


def _steps_text(video: Picture) -> str:
    return "".join(f"<{seconds:.1f} seconds>{_START}{_PADS['video']}{_END}" for seconds in video.timestamps)


def _repeated(token_ids: Sequence[int], counts: Mapping[int | None, Iterator[int]]) -> Iterator[int]:
    for token_id in token_ids:
        for _ in range(next(counts[token_id]) if token_id in counts else 1):
            yield token_id
