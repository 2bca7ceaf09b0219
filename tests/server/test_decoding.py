"""Files that crash, hang or overfill their decoder cost one refusal, and no memory of the server."""

import asyncio
import base64
import os
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onebox.server import media as module
from onebox.server.budget import ByteBudget
from onebox.server.decoding import DecoderProcesses
from onebox.server.errors import ServerBusyError
from onebox.server.fetch import FetchLimits
from onebox.server.media import Media, MediaLimits, MediaPart
from onebox.server.pool import WorkPool
from onebox.spec.errors import UsageError
from onebox.text import images
from onebox.text.images import Resize
from tests.server.conftest import wait_until
from tests.server.test_media import load
from tests.text.test_patches import IMAGES, animation, file_of, noise, write_processors

SMALL = Resize(32, 48, Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def decoders():
    made = DecoderProcesses()
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "1"])
def test_another_process_decodes_the_same_pixels(decoders, mode):
    data = file_of(noise(300, 40, mode) if mode != "1" else Image.new("1", (40, 300)))
    theirs, ours = decoders.open_image(data), images.open_image(data)
    assert (theirs.height, theirs.width) == (300, 40)
    assert np.array_equal(theirs.read(SMALL), ours.read(SMALL))


def test_another_process_decodes_the_same_frames(decoders):
    data = animation(5, 200)[0]
    theirs, ours = decoders.open_clip(data), images.open_clip(data)
    assert (theirs.num_frames, theirs.fps, theirs.height, theirs.width) == (5, 5.0, 16, 24)
    assert np.array_equal(theirs.read([0, 2, 4], SMALL), ours.read([0, 2, 4], SMALL))


def png(width, height, *chunks):
    """A one-bit image of zeros with further chunks in front of its pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes((width + 7) // 8 + 1) * height, 9))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*each) for each in chunks) + rows + chunk(b"IEND", b"")


BLOWN_UP = zlib.compress(bytes(100 << 20), 9)
BOMBS = {
    "text": png(8, 8, (b"zTXt", b"Comment\0\0" + BLOWN_UP)),
    "international text": png(8, 8, (b"iTXt", b"Comment\0\1\0\0\0" + BLOWN_UP)),
    "colour profile": png(8, 8, (b"iCCP", b"name\0\0" + BLOWN_UP)),
    "many texts": png(8, 8, *[(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(1 << 20), 9))] * 200),
    "declared size": png(2**31 - 1, 1)[:60],
    "WebP": b"RIFF\x1e\0\0\0WEBPVP8L\x11\0\0\0\x2f\xff\xff\xff\x0f" + bytes(12),
    "GIF screen": b"GIF89a\xff\xff\xff\xff\0\0\0" + file_of(noise(9, 9), "GIF")[13:],
    "TIFF": file_of(noise(9, 9), "TIFF"),
    "ICO": file_of(noise(16, 16), "ICO"),
    "EPS": file_of(noise(9, 9), "EPS"),
    "PDF": b"%PDF-1.4\n",
    "SVG": b"<?xml version='1.0'?><svg/>",
    "PSD": b"8BPS\0\1" + bytes(100),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_formats_that_are_not_read_are_refused_in_a_sentence(decoders, name):
    with pytest.raises(UsageError) as refusal:
        decoders.open_image(BOMBS[name]).read(SMALL)
    assert str(refusal.value).endswith(".")
    assert len(str(refusal.value)) < 400


def test_grey_of_16_bits_keeps_its_shades():
    shades = np.linspace(0, 65_535, 48, dtype=np.uint16)[None].repeat(32, 0)
    data = file_of(Image.fromarray(shades))
    pixels = images.open_image(data).read(Resize(32, 48, Image.Resampling.NEAREST))[0]
    assert np.array_equal(pixels, (shades >> 8).astype(np.uint8)[:, :, None].repeat(3, 2))


def test_the_header_of_a_large_file_does_not_keep_small_ones_waiting(media, monkeypatch):
    """One of millions of parts takes seconds, whatever its pixels."""
    pool, go, small = WorkPool("a test", num_threads=1, max_waiting=4), threading.Event(), file_of(noise(64, 64))
    monkeypatch.setattr(module, "_long_headers_pool", pool)
    large = small + bytes(module.SMALL_FILE_BYTES)
    url = "data:image/png;base64," + base64.b64encode(large).decode()

    async def ask():
        held = asyncio.create_task(pool.run(go.wait, 60))
        waiting = asyncio.create_task(load(media(), [MediaPart("image", url, "image")]))
        await asyncio.to_thread(loaded, media(), small)
        assert not waiting.done()
        go.set()
        await asyncio.gather(held, waiting)

    asyncio.run(ask())


def test_one_that_takes_too_long_is_ended_and_the_next_is_served():
    impatient = DecoderProcesses(image_timeout_s=0.001)
    large = file_of(Image.new("RGB", (6000, 6000)), compress_level=1)
    with pytest.raises(UsageError, match=r"takes more than 0\.001 seconds"):
        impatient.open_image(large).read(SMALL)
    patient = DecoderProcesses()
    assert patient.open_image(large).read(SMALL).shape == (1, 32, 48, 3)
    (process,) = patient._idle
    os.kill(process.pid, 11)
    process.wait()
    with pytest.raises(UsageError, match="ended with status -11"):
        patient.open_image(large)
    assert patient.open_image(large).width == 6000
    patient.close()


def test_a_decoder_has_a_limit_of_memory(decoders):
    with pytest.raises(UsageError, match="too much memory"):
        decoders.open_image(file_of(noise(9, 9))).read(Resize(30_000, 30_000, 3))
    assert decoders.open_image(file_of(noise(9, 9))).width == 9


# A request's pictures.


def loaded(media, *files, max_tokens=1 << 30):
    parts = [
        MediaPart("image", "data:image/png;base64," + base64.b64encode(data).decode(), f"image {place}")
        for place, data in enumerate(files)
    ]
    return asyncio.run(load(media, parts, max_tokens))


@pytest.fixture
def media(vision_checkpoint, tmp_path):
    def make(**limits):
        (tmp_path / "config.json").write_text((vision_checkpoint / "config.json").read_text())
        write_processors(tmp_path, images={**IMAGES, "size": {"shortest_edge": 64, "longest_edge": 1 << 20}})
        return Media.open(tmp_path, MediaLimits(fetch=FetchLimits(), **limits), has_tower=True)

    return make


def test_many_large_pictures_take_little_memory_here_and_leave_none(media, monkeypatch):
    monkeypatch.setattr(module, "_patches_budget", ByteBudget(1 << 30, "The pictures"))
    data = file_of(Image.new("1", (4000, 4000)))
    resident = []
    reader = media(max_pixels=1 << 30)
    for _ in range(2):
        vision = loaded(reader, *[data] * 2)
        assert vision.images.grids == ((1, 256, 256),) * 2
        assert module._patches_budget.num_held == vision.images.patches.nbytes
        del vision
        # The thread that filled it lets go of it a moment later.
        wait_until(lambda: module._patches_budget.num_held == 0)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert resident[1] - resident[0] < 100 << 20


def test_pixels_of_a_request_and_patches_of_all_are_limited(media, monkeypatch):
    data = file_of(noise(64, 64))
    with pytest.raises(UsageError, match="more than 10000 pixels together"):
        loaded(media(max_pixels=10_000), *[data] * 3)
    one = 256 * 96 * 4
    monkeypatch.setattr(module, "_patches_budget", ByteBudget(2 * one, "The pictures"))
    held = loaded(media(), data, data)
    with pytest.raises(ServerBusyError, match="The pictures of the requests at work hold"):
        loaded(media(), data)
    del held
    assert loaded(media(), data)
    monkeypatch.setattr(module, "MAX_PATCHES_BYTES", one)
    with pytest.raises(UsageError, match="as patches; the limit is"):
        loaded(media(), data, data)


def test_a_slow_file_does_not_keep_others_waiting(media, monkeypatch):
    """Four requests with many pictures, and one with a single picture that comes later."""
    pool, ends = WorkPool("a test", num_threads=1, max_waiting=64), []
    begun, go = threading.Event(), threading.Event()
    read_into = module._read_into

    def slow(target, picture):
        begun.set()
        go.wait(60)
        read_into(target, picture)

    monkeypatch.setattr(module, "_small_pool", pool)
    monkeypatch.setattr(module, "_read_into", slow)
    data = base64.b64encode(file_of(noise(64, 64))).decode()
    reader = media()

    async def ask(name, num_pictures):
        parts = [MediaPart("image", f"data:image/png;base64,{data}", "image")] * num_pictures
        await load(reader, parts)
        ends.append(name)

    async def wait_for_reads(number):
        """Until so many pictures wait for the one that is being read."""
        async with asyncio.timeout(60):
            while not begun.is_set() or pool._waiting.qsize() < number:
                await asyncio.sleep(0.001)

    async def both():
        many = [asyncio.create_task(ask("many", 16)) for _ in range(4)]
        await wait_for_reads(3)
        one = asyncio.create_task(ask("one", 1))
        await wait_for_reads(4)
        go.set()
        await asyncio.gather(one, *many)

    asyncio.run(both())
    assert ends[0] == "one"
