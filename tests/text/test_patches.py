"""Pictures to patches and places, held against transformers' own processors."""

import io
import json
import warnings
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as their_image_size
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as their_video_size

from onebox.spec.errors import MismatchError, UnreadableError, UnsupportedError, UsageError
from onebox.spec.model import spec_from_config
from onebox.text import images, patches
from onebox.text.images import Clip, Resize
from onebox.text.patches import Picture, PictureReader
from tests.model.configs import CONFIGS
from tests.model.oracle import TINY

SPEC = spec_from_config(CONFIGS["images"])
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.2],
    "merge_size": 2,
    "patch_size": 4,
    "size": {"longest_edge": 4096, "shortest_edge": 256},
    "temporal_patch_size": 2,
}
VIDEOS = {**IMAGES, "image_processor_type": None, "video_processor_type": "Qwen3VLVideoProcessor", "max_frames": 12}


def write_processors(directory, images=IMAGES, videos=VIDEOS):
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(videos))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    directory = tmp_path_factory.mktemp("processors")
    write_processors(directory)
    return PictureReader.load(directory, SPEC)


def noise(height, width, mode="RGB", seed=0):
    if mode == "P":
        return noise(height, width).quantize()
    num_bytes = height * width * len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, (width, height), np.random.default_rng(seed).bytes(num_bytes))


def file_of(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animation(num_frames, duration_ms, kind="WEBP", size=(24, 16)):
    frames = [noise(size[1], size[0], seed=seed) for seed in range(num_frames)]
    options = {"lossless": True} if kind == "WEBP" else {}
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=duration_ms, **options), frames


# Images.


@pytest.mark.parametrize("size", [(16, 24), (5, 90), (33, 41), (200, 130), (8, 8), (1, 1)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P"])
def test_an_image_is_cut_as_transformers_cuts_it(reader, size, mode):
    image = noise(*size, mode)
    picture = reader.open("image", file_of(image))
    theirs = Qwen2VLImageProcessorPil(**IMAGES)(images=[Image.open(io.BytesIO(file_of(image)))], return_tensors="np")
    assert [list(picture.grid)] == theirs["image_grid_thw"].tolist()
    patches = picture.read()
    assert patches.dtype == np.float32
    assert np.array_equal(patches, theirs["pixel_values"])
    assert picture.num_tokens == len(patches) // 4


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([8, 28, 32]), st.integers(1, 2000))
def test_image_sizes_are_those_of_transformers(height, width, factor, least):
    bounds = (least * factor**2, least * 50 * factor**2)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(UsageError, match="200 times"):
            patches._image_size(height, width, factor, *bounds)
        return
    assert patches._image_size(height, width, factor, *bounds) == their_image_size(height, width, factor, *bounds)


def test_low_detail_bounds_an_image_and_never_enlarges_it(reader):
    data = file_of(noise(64, 64))
    assert reader.open("image", data).grid == (1, 16, 16)
    assert reader.open("image", data, max_pixels=1024).grid == (1, 8, 8)
    assert reader.open("image", data, max_pixels=1 << 20).grid == (1, 16, 16)


def test_a_photo_is_turned_upright(reader):
    image = noise(16, 32)
    exif = image.getexif()
    exif[0x0112] = 6
    turned = reader.open("image", file_of(image, exif=exif))
    assert turned.grid == (1, 8, 4)
    assert np.array_equal(
        turned.read(), reader.open("image", file_of(image.transpose(Image.Transpose.ROTATE_270))).read()
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_known_format_is_read(reader, kind):
    assert reader.open("image", file_of(noise(16, 16), kind)).read().shape == (16, 96)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no image of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a known format"),
        (file_of(noise(9, 9), "TIFF"), "no image of a known format"),
        (file_of(noise(64, 64))[:-200], "damaged"),
        (file_of(Image.new("1", (9000, 9000))), "9000 x 9000 pixels, 81000000; the limit is 67108864"),
        (file_of(Image.new("1", (15000, 15000))), "too many pixels"),
        (file_of(Image.new("L", (500, 2))), "200 times the other"),
    ],
    ids=["nothing", "svg", "tiff", "half a file", "many pixels", "a bomb", "a thread"],
)
def test_what_is_no_sound_image_is_refused_in_a_sentence(reader, data, words):
    with pytest.raises(UsageError, match=words) as refusal:
        reader.open("image", data).read()
    assert str(refusal.value).endswith(".")


# Videos.


@given(st.integers(2, 40), st.integers(1, 600), st.integers(1, 600), st.integers(1, 300))
def test_video_sizes_are_those_of_transformers(num_frames, height, width, least):
    cutting = SimpleNamespace(factor=32, temporal_patch_size=2, min_pixels=least * 1024, max_pixels=least * 40 * 1024)
    theirs = None
    try:
        theirs = their_video_size(num_frames, height, width, 2, 32, cutting.min_pixels, cutting.max_pixels)
    except ValueError:
        with pytest.raises(UsageError, match="200 times"):
            patches._video_size(height, width, num_frames, cutting)
    assert theirs is None or patches._video_size(height, width, num_frames, cutting) == theirs


def their_videos():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Qwen3VLVideoProcessor.__new__(Qwen3VLVideoProcessor)


@given(st.integers(1, 5000), st.floats(0.5, 120), st.integers(1, 8), st.integers(8, 800))
def test_frames_are_sampled_as_transformers_samples_them(num_frames, fps, least, most):
    ours = patches._Sampling(2, least, most).frames(Clip(num_frames, fps, 1, 1, iter))
    theirs = their_videos()
    theirs.min_frames, theirs.max_frames = least, most
    metadata = SimpleNamespace(total_num_frames=num_frames, fps=fps)
    assert ours == Qwen3VLVideoProcessor.sample_frames(theirs, metadata, fps=2).tolist()


@pytest.mark.parametrize("num_frames", [4, 5])
def test_an_animation_is_cut_as_transformers_cuts_it(reader, num_frames):
    data, frames = animation(num_frames, 500)
    picture = reader.open("video", data)
    stack = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)[None]
    mean, std = (torch.tensor(VIDEOS[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
    patches, *grid = Qwen3VLVideoProcessor.patchify(their_videos(), (stack / 255 - mean) / std, 4, 2, 2)
    assert picture.grid == tuple(grid)
    torch.testing.assert_close(torch.from_numpy(picture.read()), patches[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "PNG"])
def test_an_animation_says_how_fast_it_is(reader, kind):
    picture = reader.open("video", animation(40, 50, kind)[0])
    # 2 seconds at 2 frames a second are frames 0, 13, 26 and 39.
    assert picture.timestamps == pytest.approx([(0 + 0.65) / 2, (1.3 + 1.95) / 2])
    assert picture.grid == (2, 4, 6)


def test_an_animation_of_too_many_frames_or_pixels_is_refused_before_its_frames_are_decoded(reader, monkeypatch):
    monkeypatch.setattr(images, "_frames", None)
    monkeypatch.setattr(images, "MAX_ANIMATION_PIXELS", 6 * 24 * 16 - 1)
    with pytest.raises(UsageError, match="6 frames of 24 x 16 pixels, 2304 together; the limit is 2303"):
        reader.open("video", animation(6, 100, "GIF")[0])
    monkeypatch.setattr(images, "MAX_FRAMES", 5)
    with pytest.raises(UsageError, match="has 6 frames; the limit is 5"):
        reader.open("video", animation(6, 100, "WEBP")[0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (file_of(noise(16, 16), "GIF"), "has 1 frame; send it as an image"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no video of a known format"),
        (b"\0\0\0\x18ftypmp42" + bytes(100), "damaged or not what it says"),
        (file_of(noise(16, 16), "JPEG"), "no video of a known format"),
    ],
    ids=["one frame", "a playlist", "an empty container", "a photo"],
)
def test_what_is_no_sound_video_is_refused_in_a_sentence(reader, data, words):
    with pytest.raises(UsageError, match=words) as refusal:
        reader.open("video", data).read()
    assert str(refusal.value).endswith(".")


def film(num_frames, fps=10, container="mp4", codec="mpeg4", size=(64, 48)):
    av = pytest.importorskip("av", reason="PyAV is the optional reader of videos")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for place in range(num_frames):
            # Each frame is a shade that grows with its place, so that what comes back says which frame it was.
            shade = Image.new("RGB", size, (place * 255 // num_frames,) * 3)
            output.mux(stream.encode(av.VideoFrame.from_image(shade)))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "avi"])
def test_a_film_gives_the_frames_at_two_a_second(container):
    clip = images.open_clip(film(50, container=container))
    assert (clip.num_frames, clip.fps, clip.height, clip.width) == (50, 10, 48, 64)
    places = patches._Sampling().frames(clip)
    assert len(places) == 10
    shades = [int(frame.mean()) for frame in clip.read(places, Resize(48, 64, Image.Resampling.BICUBIC))]
    assert shades == pytest.approx([place * 255 // 50 for place in places], abs=4)


def test_a_film_becomes_patches(reader):
    picture = reader.open("video", film(50))
    assert picture.grid[0] == 5
    assert picture.read().shape == (np.prod(picture.grid), 96)


def test_damaged_and_endless_films_are_refused(reader, monkeypatch):
    data = film(50)
    with pytest.raises(UsageError, match=r"damaged|ends before"):
        reader.open("video", data[: len(data) // 2]).read()
    monkeypatch.setattr(images, "MAX_FRAMES", 49)
    with pytest.raises(UsageError, match="has 50 frames; the limit is 49"):
        reader.open("video", data)
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    with pytest.raises(UsageError, match="64 x 48 pixels, 3072; the limit is 1000"):
        reader.open("video", data)


def test_a_film_without_its_reader_says_what_to_install(reader, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'onebox\[video\]'"):
        reader.open("video", b"\0\0\0\x18ftypmp42")


WHOLE = [file_of(noise(40, 56), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
WHOLE += [animation(6, 100, kind)[0] for kind in ("GIF", "WEBP", "PNG")]


@given(
    st.sampled_from(WHOLE),
    st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=4), st.integers(0, 8)), max_size=4),
    st.integers(0, 9999),
    st.sampled_from(["image", "video"]),
)
def test_a_file_with_any_damage_is_read_or_refused(reader, data, changes, length, kind):
    for place, written, num_gone in changes:
        data = data[:place] + written + data[place + num_gone :]
    with suppress(UsageError):
        reader.open(kind, data[:length]).read()


# Their places.


def picture(kind, grid, timestamps=()):
    return Picture(kind, grid, grid[1] * grid[2] // 4, timestamps, lambda: np.zeros(0, np.float32))


START, END = "<|vision_start|>", "<|vision_end|>"
VIDEO_PAD = "<|video_pad|>"
PLACE = {kind: f"{START}<|{kind}_pad|>{END}" for kind in ("image", "video")}


def test_pads_are_written_as_transformers_writes_them(reader, tokenizer):
    shown = [picture("image", (1, 4, 6)), picture("video", (2, 4, 8), (0.25, 11.34)), picture("image", (1, 2, 2))]
    template = f"One:{{}}{PLACE['video']}!{PLACE['image']}\n"
    metadata = SimpleNamespace(fps=100.0, frames_indices=[0, 50, 1034, 1234])
    theirs = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token=START,
        vision_end_token=END,
        video_token=VIDEO_PAD,
        _calculate_timestamps=lambda *a: Qwen3VLProcessor._calculate_timestamps(None, *a),
    )
    made = {"video_grid_thw": torch.tensor([[2, 4, 8]]), "video_metadata": [metadata]}
    video = Qwen3VLProcessor.replace_video_token(theirs, made, 0)
    written = f"One:{START}{'<|image_pad|>' * 6}{END}{video}!{START}<|image_pad|>{END}\n"
    assert reader.encode(template.format(PLACE["image"]), shown, tokenizer.encode) == tokenizer.encode(written)


@pytest.mark.parametrize("text", ["no place", PLACE["image"] * 2, PLACE["image"] + PLACE["video"]])
def test_places_and_pictures_that_disagree_are_refused(reader, tokenizer, text):
    with pytest.raises(UsageError, match="places for"):
        reader.encode(text, [picture("image", (1, 4, 6))], tokenizer.encode)


# The checkpoint's files.


def test_newer_processor_files_say_the_same(tmp_path, reader):
    both = {"image_processor": IMAGES, "video_processor": VIDEOS, "processor_class": "Qwen3VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    newer = PictureReader.load(tmp_path, SPEC)
    for kind, data in (("image", file_of(noise(30, 40))), ("video", animation(4, 500)[0])):
        assert np.array_equal(newer.open(kind, data).read(), reader.open(kind, data).read())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"do_resize": False}, UnsupportedError, "sets do_resize to False"),
        ({"sharpen": 3}, UnsupportedError, "sets sharpen to 3"),
        ({"patch_size": None}, UnreadableError, "does not say how"),
        ({"size": {}}, UnreadableError, "has no shortest_edge"),
        ({"patch_size": 8}, MismatchError, "patch_size is 8 and .* is 4"),
    ],
)
def test_processor_files_that_cannot_be_honoured_are_refused(tmp_path, change, error, words):
    write_processors(tmp_path, images={**IMAGES, **change})
    with pytest.raises(error, match=words):
        PictureReader.load(tmp_path, SPEC)


def test_a_checkpoint_without_tower_or_files_says_so(tmp_path):
    with pytest.raises(UnsupportedError, match="reads text only"):
        PictureReader.load(tmp_path, spec_from_config(TINY))
    with pytest.raises(UnsupportedError, match=r"has no preprocessor_config\.json"):
        PictureReader.load(tmp_path, SPEC)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    with pytest.raises(UnsupportedError, match="reads no videos"):
        PictureReader.load(tmp_path, SPEC).open("video", animation(4, 500)[0])
