"""Images and videos through the engine: the answers of transformers, and a prefix cache that knows pictures apart."""

from dataclasses import replace

import pytest
import torch

from onebox.engine.api import CacheTier, Failed, Finished, Pictures, Request, SamplingParams, Tokens, Vision
from onebox.engine.disk.rates import DiskRates
from onebox.engine.images import PictureCache
from onebox.engine.plan import EngineOptions, TokenInfo, plan_engine
from onebox.engine.start import start_engine
from onebox.model.vision import Tower
from tests.model.test_vision import PROMPTS, Prompt, case, save

pytestmark = pytest.mark.usefixtures("no_gradients")

NUM_TOKENS = 12
OPTIONS = EngineOptions(
    device="cpu",
    dtype="float32",
    max_model_len=1024,
    kv_cache_memory_bytes=16 << 20,
    max_num_batched_tokens=64,
    speculation="mtp",
)


@pytest.fixture
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    target = tmp_path_factory.mktemp("vision")
    save(target, case()[1])
    return target


@pytest.fixture(scope="module")
def engine(directory):
    with start_engine(plan_engine(directory, OPTIONS, TokenInfo()), TokenInfo()) as engine:
        yield engine


def vision_of(prompt):
    def pictures(pixels):
        return pixels and Pictures(pixels.patches.numpy(), tuple(map(tuple, pixels.grids.tolist())))

    return Vision(pictures(prompt.images), pictures(prompt.videos))


def ask(engine, name, prompt, vision):
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    tokens, logprobs = [], []
    for event in engine.submit(Request(name, tuple(prompt.ids), sampling, vision=vision)):
        if isinstance(event, Tokens):
            tokens += event.token_ids
            logprobs += [entry.logprob for entry in event.logprobs]
        if isinstance(event, Finished | Failed):
            break
    return tokens, logprobs, event


@pytest.mark.parametrize("name", PROMPTS)
def test_answers_about_pictures_are_those_of_transformers(engine, name):
    """Their model fed with our answer gives each of its tokens the same probability."""
    prompt = PROMPTS[name]
    tokens, logprobs, end = ask(engine, f"cold {name}", prompt, vision_of(prompt))
    assert isinstance(end, Finished), end
    _, _, model = case()
    inputs = prompt.for_transformers()
    whole = torch.tensor([*prompt.ids, *tokens])
    inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, NUM_TOKENS))
    expected = model(whole[None], **inputs).logits[0].log_softmax(-1)[len(prompt.ids) - 1 : -1]
    theirs = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    # bfloat16 keys and values stand between our pages and their float32 cache.
    assert (theirs - torch.tensor(logprobs)).abs().max() < 0.05
    warm = ask(engine, f"warm {name}", prompt, vision_of(prompt))
    assert warm[:2] == (tokens, logprobs)


def test_another_picture_in_the_same_place_is_another_prefix(engine):
    prompt = Prompt(20, ("image", (1, 12, 8)), 200)
    other = replace(vision_of(prompt).images, patches=-vision_of(prompt).images.patches)
    first = ask(engine, "first", prompt, vision_of(prompt))
    second = ask(engine, "second", prompt, Vision(other))
    again = ask(engine, "again", prompt, vision_of(prompt))
    assert first[1] != second[1]
    assert again[:2] == first[:2]
    assert second[2].counts.cached_tokens == 0
    assert again[2].counts.cached_tokens == 192


def test_a_lookup_knows_pictures_apart_without_the_tower(engine, monkeypatch):
    prompt = Prompt(20, ("image", (1, 12, 8)), 210)
    other = Vision(replace(vision_of(prompt).images, patches=vision_of(prompt).images.patches + 1))
    ask(engine, "computed", prompt, vision_of(prompt))
    monkeypatch.setattr(Tower, "encode", lambda *_: pytest.fail("the tower ran"))
    seen, unseen = (
        engine.lookup(Request("asked", tuple(prompt.ids), vision=vision)) for vision in (vision_of(prompt), other)
    )
    monkeypatch.undo()
    again = ask(engine, "again", prompt, vision_of(prompt))[2]
    assert (seen.cached_tokens, seen.tier) == (again.counts.cached_tokens, "memory")
    assert (unseen.cached_tokens, unseen.tier) == (0, None)


def test_prefixes_with_pictures_come_back_from_disk_after_a_restart(directory, engine, tmp_path, monkeypatch):
    """And those of another picture do not."""
    monkeypatch.setattr(DiskRates, "read_pays", lambda *_: True)  # which is faster depends on the machine
    prompt = Prompt(20, ("image", (1, 12, 8)), 220)
    vision = vision_of(prompt)
    other = Vision(replace(vision.images, patches=vision.images.patches * 2))
    expected = ask(engine, "without a disk", prompt, vision)[:2]
    plan = plan_engine(directory, replace(OPTIONS, prefix_dir=tmp_path), TokenInfo())
    with start_engine(plan, TokenInfo()) as before:
        assert ask(before, "before", prompt, vision)[:2] == expected
    with start_engine(plan, TokenInfo()) as after:
        assert after.lookup(Request("seen", tuple(prompt.ids), vision=vision)).tier is CacheTier.DISK
        tokens, logprobs, end = ask(after, "after", prompt, vision)
        assert after.lookup(Request("unseen", tuple(prompt.ids), vision=other)).cached_tokens == 0
    assert (tokens, logprobs) == expected
    assert (end.counts.cached_tokens, end.counts.cached_tier) == (256, CacheTier.DISK)


def test_pads_without_a_picture_end_the_request_in_a_sentence(engine):
    prompt = Prompt(20, ("image", (1, 12, 8)), 30)
    end = ask(engine, "half", prompt, Vision(replace(vision_of(prompt).images, grids=((1, 6, 8), (1, 6, 4)))))[2]
    assert isinstance(end, Failed)
    assert end.message.endswith(".")


def test_a_model_started_without_its_tower_says_so(directory):
    options = replace(OPTIONS, language_model_only=True)
    plan = plan_engine(directory, options, TokenInfo())
    with start_engine(plan, TokenInfo()) as engine:
        end = ask(engine, "blind", PROMPTS["video"], vision_of(PROMPTS["video"]))[2]
    assert isinstance(end, Failed)
    assert "without its vision tower" in end.message
    assert plan.memory.weights_bytes < plan_engine(directory, OPTIONS, TokenInfo()).memory.weights_bytes


def test_a_picture_already_seen_is_not_encoded_again(engine, monkeypatch):
    """Neither in the same prompt nor in another, whatever stands before it."""
    first, second = Prompt(20, ("image", (1, 12, 8)), 10), Prompt(33, ("image", (1, 12, 8)), 40, seed=3)
    pixels = vision_of(first).images
    shown = replace(pixels, patches=pixels.patches + 3)
    expected = ask(engine, "unseen", second, Vision(shown))
    encoded = []
    real = Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda tower, pictures: encoded.append(1) or real(tower, pictures))
    ask(engine, "in another prompt", first, Vision(shown))
    again = ask(engine, "again", second, Vision(shown))
    assert not encoded
    assert again[:2] == expected[:2]
    ask(engine, "another picture", first, Vision(replace(pixels, patches=pixels.patches - 3)))
    assert len(encoded) == 1


def test_kept_pictures_stay_within_their_bytes():
    cache = PictureCache(max_bytes=100)
    rows = {name: torch.ones(10) for name in (b"a", b"b", b"c")}
    for name in (b"a", b"b"):
        cache.put(name, rows[name])
    assert cache.get(b"a") is rows[b"a"]
    cache.put(b"c", rows[b"c"])
    assert cache.get(b"b") is None
    assert cache.get(b"a") is rows[b"a"]
    cache.put(b"large", torch.ones(100))
    assert cache.get(b"large") is None
    assert cache.get(b"c") is rows[b"c"]


def test_answers_about_pictures_do_not_depend_on_company(directory):
    """The gate with pictures: alone, all at once, in chunks of 64 with drafts, and from the cache: the same bits."""
    prompts = [
        Prompt(20, ("image", (1, 12, 8)), 30),
        Prompt(5, ("image", (1, 4, 4)), 3, ("image", (1, 8, 12)), 70, seed=1),
        Prompt(90, ("video", (2, 8, 8)), 12, seed=2),
        Prompt(65, seed=4),
        Prompt(20, ("image", (1, 12, 8)), 31),
    ]
    sampling = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, seed=7)

    def answers(engine, *, together):
        def request(number, prompt):
            return Request(f"{together} {number}", tuple(prompt.ids), sampling, vision=vision_or_none(prompt))

        if together:
            return [read(handle) for handle in [engine.submit(request(*each)) for each in enumerate(prompts)]]
        return [read(engine.submit(request(*each))) for each in enumerate(prompts)]

    with start_engine(plan_engine(directory, OPTIONS, TokenInfo()), TokenInfo()) as first:
        alone = answers(first, together=False)
        cached = answers(first, together=True)
    with start_engine(plan_engine(directory, OPTIONS, TokenInfo()), TokenInfo()) as second:
        together = answers(second, together=True)
    assert alone == together == cached
    assert alone[0] != alone[1]


def vision_or_none(prompt):
    vision = vision_of(prompt)
    return vision if vision.images or vision.videos else None


def read(handle):
    tokens, logprobs = [], []
    for event in handle:
        if isinstance(event, Tokens):
            tokens += event.token_ids
            logprobs += [entry.logprob for entry in event.logprobs]
        if isinstance(event, Finished | Failed):
            assert isinstance(event, Finished), event
            break
    return tokens, logprobs
