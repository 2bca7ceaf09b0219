"""Images and videos over HTTP, on the tiny model with a vision tower."""

import asyncio
import base64
import io

import numpy as np
import pytest
from PIL import Image

from onebox.engine.api import Finished, Pictures, Request, SamplingParams, Tokens, Vision
from onebox.server import media as module
from onebox.server.fetch import FetchLimits
from onebox.server.media import Media, MediaLimits, MediaPart, media_parts
from onebox.spec.errors import OneboxError, UsageError
from tests.model.test_vision import IMAGE, VIDEO
from tests.server.conftest import events
from tests.text.test_patches import IMAGES, animation, file_of, noise, write_processors

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def data_url(data, content_type="image/png"):
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"


def image_part(data, **fields):
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


def video_part(data):
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/webp")}}


async def load(media, parts, max_tokens=1 << 30):
    """The patches of all parts, as of a prompt that fits; None where there are none."""
    with media.files() as files:
        opened = await media.open_parts(parts, max_tokens, files)
        return await opened.read() if opened else None


def text_part(text):
    return {"type": "text", "text": text}


PICTURE, OTHER = (file_of(noise(48, 32, seed=seed)) for seed in (1, 2))


def answer(response):
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["token_ids"], body["usage"]


def ask(client, *parts, **fields):
    return answer(client.chat(list(parts), return_token_ids=True, **{**GREEDY, **fields}))


def test_an_image_over_http_is_answered_as_its_pictures_given_to_the_engine(vision_client, vision_engine):
    """The processor of transformers makes the patches here, and the prompt is laid out by hand."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokens, usage = ask(vision_client, text_part("See:"), image_part(PICTURE), text_part("What is it?"))
    made = Qwen2VLImageProcessorPil(**IMAGES)(images=[Image.open(io.BytesIO(PICTURE))], return_tensors="np")
    grid = tuple(made["image_grid_thw"][0].tolist())
    assert grid == (1, 12, 8)
    place = "<|vision_start|>" + "<|image_pad|>" * 24 + "<|vision_end|>"
    text = vision_client.service.template.render([{"role": "user", "content": f"See:{place}What is it?"}])
    prompt = vision_client.service.tokenizer.encode(text)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    vision = Vision(Pictures(made["pixel_values"], (grid,)))
    expected = []
    for event in vision_engine.submit(Request("by hand", prompt, sampling, vision=vision)):
        if isinstance(event, Tokens):
            expected += event.token_ids
        if isinstance(event, Finished):
            break
    assert tokens == expected
    assert usage["prompt_tokens"] == len(prompt)


def logprobs(client, *parts):
    body = client.chat(list(parts), logprobs=True, **GREEDY).json()
    return [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]]


def test_another_image_gets_another_answer(vision_client):
    assert logprobs(vision_client, image_part(PICTURE)) != logprobs(vision_client, image_part(OTHER))


def test_the_same_image_again_comes_from_the_prefix_cache_and_another_does_not(vision_client):
    long = text_part("Look at this for a while. " * 8)
    first, cold = ask(vision_client, long, image_part(PICTURE), long)
    again, warm = ask(vision_client, long, image_part(PICTURE), long)
    other = ask(vision_client, long, image_part(OTHER), long)[1]
    assert first == again
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (cold, other, warm)]
    # The other one shares what stands before the image, and nothing behind it.
    first_pad = vision_client.requests[0].prompt.index(IMAGE)
    assert cached[0] <= cached[1] <= first_pad
    assert cached[2] > first_pad + 24


def test_a_stream_says_the_same_as_a_whole_answer(vision_client):
    parts = [image_part(PICTURE), text_part("And?")]
    whole = vision_client.chat(parts, **GREEDY).json()["choices"][0]["message"]
    chunks = events(vision_client.chat(parts, stream=True, **GREEDY))
    told = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in told) == (whole[name] or "")


def test_a_video_is_shown_step_by_step_with_its_times(vision_client):
    ask(vision_client, text_part("First:"), image_part(PICTURE), video_part(animation(4, 500)[0]))
    request = vision_client.requests[-1]
    shown = b"".join(map(vision_client.service.tokenizer.shown_bytes, request.prompt)).decode()
    steps = [f"<{seconds} seconds><|vision_start|>{'<|video_pad|>' * 6}<|vision_end|>" for seconds in (0.2, 1.2)]
    assert f"<|vision_end|>{''.join(steps)}<|im_end|>" in shown
    assert request.prompt.count(IMAGE) == 24
    assert request.prompt.count(VIDEO) == 12
    assert request.vision.videos.grids == ((2, 4, 6),)
    assert logprobs(vision_client, video_part(animation(4, 500)[0])) != logprobs(
        vision_client, video_part(animation(5, 500)[0])
    )


def test_pictures_keep_their_order_across_messages(vision_client):
    body = {
        "messages": [
            {"role": "user", "content": [image_part(PICTURE)]},
            {"role": "assistant", "content": "A picture."},
            {"role": "user", "content": [text_part("And this?"), image_part(OTHER)]},
        ],
        **GREEDY,
    }
    response = vision_client.request("POST", "/v1/chat/completions", json_body=body)
    assert response.status_code == 200, response.text
    patches = vision_client.requests[-1].vision.images.patches
    halves = [image_patches(vision_client, data) for data in (PICTURE, OTHER)]
    assert np.array_equal(patches, np.concatenate(halves))


def test_a_pad_token_spelled_in_a_text_is_text(vision_client):
    spelled = "<|vision_start|><|image_pad|><|vision_end|><|video_pad|>"
    ask(vision_client, text_part(spelled), image_part(PICTURE), text_part(spelled))
    request = vision_client.requests[-1]
    assert (request.prompt.count(IMAGE), request.prompt.count(VIDEO)) == (24, 0)
    # The tiny tokenizer has a token for each byte.
    shown = bytes(vision_client.service.tokenizer.token_bytes(i)[0] for i in request.prompt if i < 256).decode()
    assert shown.count(spelled) == 2


def image_patches(client, data):
    ask(client, image_part(data))
    return client.requests[-1].vision.images.patches


def test_low_detail_takes_fewer_tokens(vision_client, vision_checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((vision_checkpoint / "config.json").read_text())
    write_processors(tmp_path, images={**IMAGES, "size": {"shortest_edge": 64, "longest_edge": 1 << 22}})
    large = file_of(Image.new("L", (1024, 1024)))
    parts = [image_part(large, detail="low"), image_part(large, detail="high"), image_part(large)]
    media = Media.open(tmp_path, has_tower=True)
    loaded = asyncio.run(load(media, media_parts([{"role": "user", "content": parts}]), 1 << 20))
    assert loaded.images.grids == ((1, 128, 128), (1, 256, 256), (1, 256, 256))
    assert ask(vision_client, image_part(PICTURE, detail="low"), image_part(PICTURE, detail="auto"))


def test_tokenize_counts_a_pictures_tokens(vision_client):
    messages = [{"role": "user", "content": [image_part(PICTURE), text_part("Hi")]}]
    counted = vision_client.request("POST", "/tokenize", json_body={"messages": messages}).json()
    assert counted["tokens"].count(IMAGE) == 24
    assert counted["count"] == ask(vision_client, image_part(PICTURE), text_part("Hi"))[1]["prompt_tokens"]


# Refusals.

BOMB = file_of(Image.new("1", (9000, 9000)))
NAME = "messages.0.content.0.image_url.url"


@pytest.mark.parametrize(
    ("parts", "param", "words"),
    [
        ([image_part(b"no picture")], NAME, "no image of a known format"),
        ([image_part(BOMB)], NAME, "the limit is 67108864"),
        ([image_part(bytes(200_001))], NAME, "longer than 200000 bytes"),
        ([image_part(PICTURE)] * 4, "messages.0.content.3.image_url.url", "has 4 images; this server takes at most 3"),
        ([video_part(PICTURE)] * 2, "messages.0.content.1.video_url.url", "has 2 videos; this server takes at most 1"),
        ([text_part("x"), video_part(PICTURE)], "messages.0.content.1.video_url.url", "send it as an image"),
        ([{"type": "image_url", "image_url": {"url": "http://localhost/"}}], NAME, "private address"),
        ([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}], NAME, "private address"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], NAME, "--allowed-local-media-path"),
        ([{"type": "image_url", "image_url": {}}], NAME, "missing"),
        (
            [{"type": "image_url", "image_url": {"url": "x", "size": 3}}],
            "messages.0.content.0.image_url.size",
            "remove",
        ),
        ([{"type": "input_audio"}], "messages.0.content.0", "must be one of text, image_url, video_url"),
    ],
)
def test_pictures_that_cannot_be_shown_are_refused_with_the_field_named(vision_client, parts, param, words):
    response = vision_client.chat(parts)
    error = response.json()["error"]
    assert response.status_code == 400
    assert words in error["message"]
    assert error["param"] == param
    assert not vision_client.requests


def test_pictures_beyond_the_context_are_refused_before_they_are_decoded(vision_client, monkeypatch):
    def read(*_):
        raise AssertionError("it was decoded")

    monkeypatch.setattr(module, "_read_into", read)
    # Three of 64 x 64 pixels, the most that this processor makes of an image: 64 tokens each.
    limits = vision_client.service.engine.config.max_model_len
    media = vision_client.service.media
    parts = [MediaPart("image", data_url(file_of(noise(64, 64))), "image")] * 3
    with pytest.raises(OneboxError, match="have 192 tokens and the context holds 192, answer included"):
        asyncio.run(load(media, parts, 192))
    assert limits > 192


def test_a_picture_is_decoded_only_once_the_whole_prompt_fits(vision_client, monkeypatch):
    """The text is tokenised first, also for a count of tokens alone."""

    def read(*_):
        raise AssertionError("it was decoded")

    monkeypatch.setattr(module, "_read_into", read)
    response = vision_client.chat([image_part(PICTURE), text_part("x" * 800)])
    assert response.json()["error"]["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": [image_part(PICTURE)]}]
    response = vision_client.request("POST", "/tokenize", json_body={"messages": messages})
    assert response.json()["tokens"].count(IMAGE) == 24


def test_truncation_fetches_and_decodes_a_picture_once(vision_client, monkeypatch):
    fetched, decoded = [], []
    fetch, read_into = module.fetch, module._read_into
    monkeypatch.setattr(module, "fetch", lambda *given: (fetched.append(given[1]), fetch(*given))[1])
    monkeypatch.setattr(module, "_read_into", lambda *given: (decoded.append(1), read_into(*given))[1])
    turns = [{"role": "user", "content": 20 * "x"} for _ in range(60)]
    last = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(PICTURE)}]}
    body = {"input": [*turns, last], "truncation": "auto", "max_output_tokens": 1}
    response = vision_client.request("POST", "/v1/responses", json_body=body)
    assert response.status_code == 200, response.text
    assert response.json()["truncated_items"] > 0
    assert (len(fetched), len(decoded)) == (1, 1)


def test_a_model_without_a_tower_refuses_pictures_in_a_sentence(scripted, vision_checkpoint):
    response = scripted("Hello").chat([image_part(PICTURE)])
    error = response.json()["error"]
    assert response.status_code == 400
    assert "reads text only" in error["message"]
    assert error["param"] == NAME
    text_only = Media.open(vision_checkpoint, has_tower=False)
    with pytest.raises(OneboxError, match="without a vision tower"):
        asyncio.run(load(text_only, [MediaPart("image", data_url(PICTURE), NAME)], 1000))


def test_a_checkpoint_without_a_preprocessor_refuses_pictures_with_that_reason(vision_checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((vision_checkpoint / "config.json").read_text())
    media = Media.open(tmp_path, has_tower=True)
    assert asyncio.run(load(media, [], 1000)) is None
    with pytest.raises(OneboxError, match=r"has no preprocessor_config\.json.* it reads text only") as caught:
        asyncio.run(load(media, [MediaPart("image", data_url(PICTURE), NAME)], 1000))
    assert str(tmp_path) not in str(caught.value), "clients are not told where files lie"


def test_other_apis_show_images_too(vision_client):
    url = data_url(PICTURE)
    told = {
        "role": "user",
        "content": [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "Hi"}],
    }
    response = vision_client.request("POST", "/v1/responses", json_body={"input": [told], "max_output_tokens": 8})
    assert response.status_code == 200, response.text
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PICTURE).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Hi"}]
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    response = vision_client.request("POST", "/v1/messages", json_body=body)
    assert response.status_code == 200, response.text
    assert [request.prompt.count(IMAGE) for request in vision_client.requests] == [24, 24]
    assert all(request.vision is not None for request in vision_client.requests)


def test_the_model_says_what_it_reads(vision_client, scripted):
    assert vision_client.request("GET", "/v1/models").json()["data"][0]["input_modalities"] == [
        "text",
        "image",
        "video",
    ]
    assert scripted("").request("GET", "/v1/models").json()["data"][0]["input_modalities"] == ["text"]


def test_counts_per_prompt_are_taken_as_vllm_writes_them():
    fetch = FetchLimits(allows_private=True)
    assert MediaLimits.of_counts({}, fetch) == MediaLimits(fetch=fetch)
    assert MediaLimits.of_counts({"image": 4, "video": 0}, fetch) == MediaLimits(4, 0, fetch)
    for wrong in ({"image": -1}, {"image": True}, {"audio": 1}, {"video": {"count": 1}}):
        with pytest.raises(UsageError, match=r"--limit-mm-per-prompt sets .* it takes image and video"):
            MediaLimits.of_counts(wrong, fetch)
