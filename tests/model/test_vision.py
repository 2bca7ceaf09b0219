"""Prompts with images and videos: transformers' tower under our loading, our places and our positions."""

import json
import subprocess
import sys
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

from onebox.model import reference
from onebox.model.reference import Cache
from onebox.model.vision import Pixels, embeddings_for, load_tower, positions_for
from onebox.spec.errors import MismatchError, UnsupportedError
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass, modules
from onebox.spec.shapes import SHAPES
from tests.model.configs import CONFIGS
from tests.model.oracle import TINY, assert_close, clear_logits, loud_model, tiny_config, token_ids, transformers_model

pytestmark = pytest.mark.usefixtures("no_gradients")

CONFIG = CONFIGS["images"]
SPEC = spec_from_config(CONFIG)
START, END = CONFIG["vision_start_token_id"], CONFIG["vision_end_token_id"]
IMAGE, VIDEO = SPEC.image_token_id, SPEC.video_token_id
PATCH_SIZE = 3 * 2 * 4 * 4
POS_EMBED = "model.visual.pos_embed.weight"


@pytest.fixture
def no_gradients():
    with torch.inference_mode():
        yield


@cache
def case():
    spec, weights = loud_model(CONFIG)
    return spec, weights, transformers_model(CONFIG, weights)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("images")
    save(directory, case()[1])
    return directory


def save(directory, weights, config=CONFIG):
    save_file({name: tensor.clone() for name, tensor in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


class Prompt:
    """A prompt of text (a number of tokens), images and videos (a kind and a grid), as the processor lays it out."""

    def __init__(self, *parts, seed=0):
        self.ids: list[int] = []
        grids = {"image": [], "video": []}
        text = iter(token_ids(2000, seed=seed).tolist())
        for part in parts:
            if isinstance(part, int):
                self.ids += [next(text) for _ in range(part)]
                continue
            kind, (time, height, width) = part
            grids[kind].append([time, height, width])
            if kind == "image":
                self.ids += [START] + [IMAGE] * (time * height * width // 4) + [END]
            else:
                for _ in range(time):
                    timestamp = [next(text) for _ in range(3)]
                    self.ids += [*timestamp, START] + [VIDEO] * (height * width // 4) + [END]
        self.tokens = torch.tensor(self.ids)
        self.images, self.videos = (self._pixels(grids[kind]) for kind in ("image", "video"))

    def _pixels(self, grids):
        if not grids:
            return None
        count = sum(time * height * width for time, height, width in grids)
        return Pixels(
            torch.randn(count, PATCH_SIZE, generator=torch.Generator().manual_seed(count)), torch.tensor(grids)
        )

    @property
    def grids(self):
        return tuple(pixels.grids if pixels else None for pixels in (self.images, self.videos))

    @property
    def kinds(self):
        """Which tokens are text (0), image (1) and video (2): what transformers wants to be told."""
        return (self.tokens == IMAGE).int() + 2 * (self.tokens == VIDEO).int()

    def for_transformers(self):
        inputs = {"mm_token_type_ids": self.kinds[None]}
        if self.images:
            inputs |= {"pixel_values": self.images.patches, "image_grid_thw": self.images.grids}
        if self.videos:
            inputs |= {"pixel_values_videos": self.videos.patches, "video_grid_thw": self.videos.grids}
        return inputs


def our_inputs(prompt, tower):
    """Embeddings and positions of the prompt, as `reference.forward` takes them."""
    images, videos = (tower.encode(pixels) if pixels else None for pixels in (prompt.images, prompt.videos))
    embeddings = embeddings_for(SPEC, case()[1], prompt.tokens, images, videos)
    return embeddings, positions_for(prompt.tokens, *prompt.grids, SPEC)


LAYOUTS = {
    "text only": Prompt(11),
    "one image": Prompt(("image", (1, 4, 6))),
    "image between text": Prompt(5, ("image", (1, 8, 4)), 7),
    "two images": Prompt(3, ("image", (1, 2, 2)), ("image", (1, 4, 10)), 2),
    "image of several steps": Prompt(2, ("image", (5, 4, 4)), 3),
    "video": Prompt(4, ("video", (3, 4, 6)), 5),
    "two videos and an image": Prompt(1, ("video", (2, 4, 2)), 2, ("image", (1, 6, 4)), ("video", (1, 2, 8)), 9),
}


@pytest.mark.parametrize("prompt", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_positions_equal_those_of_transformers(prompt):
    theirs, delta = case()[2].model.get_rope_index(
        prompt.tokens[None], prompt.kinds[None], *prompt.grids, attention_mask=None
    )
    ours = positions_for(prompt.tokens, *prompt.grids, SPEC)
    assert torch.equal(ours, theirs[:, 0])
    assert ours.max() + 1 == len(prompt.ids) + int(delta)


def test_positions_of_a_model_without_a_tower_are_those_of_text():
    assert torch.equal(
        positions_for(torch.arange(384), None, None, spec_from_config(TINY)), torch.arange(384).expand(3, -1)
    )


def filled(num_tokens):
    """A prompt of this length around an image of 24 tokens; the shortest is one image of a single token and no text."""
    if num_tokens == 1:
        prompt = Prompt(("image", (1, 2, 2)))
        prompt.ids, prompt.tokens = [IMAGE], torch.tensor([IMAGE])
        return prompt
    return Prompt(20, ("image", (1, 12, 8)), num_tokens - 20 - 26, seed=num_tokens)


PROMPTS = {f"image in {count} tokens": filled(count) for count in (1, 63, 64, 65, 500)}
PROMPTS |= {
    "video": Prompt(9, ("video", (4, 8, 4)), 12),
    "images and videos": Prompt(
        3, ("image", (1, 4, 4)), 6, ("video", (2, 4, 8)), ("image", (1, 10, 4)), ("video", (1, 4, 4)), 20
    ),
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_logits_of_the_prompt_and_of_40_decode_steps_equal_those_of_transformers(checkpoint, prompt):
    spec, weights, model = case()
    inputs, tower = prompt.for_transformers(), load_tower(checkpoint)
    expected = clear_logits(model, spec, prompt.tokens, **inputs)
    embeddings, positions = our_inputs(prompt, tower)
    memory, past = Cache.empty(spec), None
    hidden = reference.forward(spec, weights, embeddings, memory, positions)
    assert_close(reference.lm_head(spec, weights, hidden), expected)
    assert memory.next_position == positions.max() + 1

    past = model(prompt.tokens[None], use_cache=True, **inputs).past_key_values
    for token in token_ids(40, seed=11).split(1):
        theirs = model(token[None], past_key_values=past, use_cache=True)
        past = theirs.past_key_values
        ours = reference.lm_head(spec, weights, reference.forward(spec, weights, token, memory))
        assert_close(ours, theirs.logits[0])


def test_feeding_a_prompt_with_an_image_in_pieces_gives_the_same_logits(checkpoint):
    spec, weights, _ = case()
    embeddings, positions = our_inputs(PROMPTS["image in 65 tokens"], load_tower(checkpoint))
    whole = reference.forward(spec, weights, embeddings, Cache.empty(spec), positions)
    memory = Cache.empty(spec)
    pieces = [
        reference.forward(spec, weights, rows, memory, triples)
        for rows, triples in zip(embeddings.split(30), positions.split(30, dim=1), strict=True)
    ]
    assert_close(torch.cat(pieces), whole)


def test_pixels_and_axes_make_a_difference(checkpoint):
    spec, weights, _ = case()
    prompt = PROMPTS["image in 65 tokens"]
    embeddings, positions = our_inputs(prompt, load_tower(checkpoint))
    right = reference.forward(spec, weights, embeddings, Cache.empty(spec), positions)
    for other in (
        reference.forward(spec, weights, prompt.tokens, Cache.empty(spec), positions),
        reference.forward(spec, weights, embeddings, Cache.empty(spec)),
    ):
        assert (other - right).abs().max() > 0.05 * right.abs().max()


# Loading the tower.


def test_the_tower_equals_that_of_transformers_and_in_bfloat16_nearly(checkpoint):
    pixels = PROMPTS["images and videos"].images
    theirs = case()[2].model.visual(pixels.patches, grid_thw=pixels.grids).pooler_output
    assert_close(load_tower(checkpoint).encode(pixels), theirs)
    narrow = load_tower(checkpoint, torch.bfloat16)
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.bfloat16}
    assert_close(narrow.encode(pixels), theirs, torch.bfloat16)


def test_a_picture_is_encoded_by_itself_and_a_long_video_by_some_of_its_frames(checkpoint, monkeypatch):
    tower = load_tower(checkpoint)
    grids = torch.tensor([[1, 4, 6], [5, 2, 4], [1, 2, 2]])
    patches = torch.randn(24 + 40 + 4, PATCH_SIZE, generator=torch.Generator().manual_seed(3))
    theirs = tower.model(patches, grid_thw=grids).pooler_output
    assert_close(tower.encode(Pixels(patches, grids)), theirs)
    alone = tower.encode(Pixels(patches[24:64], grids[1:2]))
    assert torch.equal(tower.encode(Pixels(patches, grids))[6:16], alone)
    monkeypatch.setattr("onebox.model.vision._PIECE_PATCHES", 16)
    assert_close(tower.encode(Pixels(patches, grids)), theirs)


@pytest.mark.parametrize("name", ["qwen3.5-122b-a10b", "qwen3.5-35b-a3b"])
def test_a_published_tower_has_333_tensors_and_they_are_those_of_transformers(name):
    config = SHAPES[name]
    hf_config = Qwen3_5MoeConfig(**{**config, "vision_config": dict(config["vision_config"])})
    with torch.device("meta"):
        theirs = Qwen3_5MoeVisionModel(hf_config.vision_config).state_dict()
    ours = {
        module.plain_tensor.removeprefix("model.visual."): module.shape
        for module in modules(spec_from_config(config))
        if module.module_class is ModuleClass.VISION
    }
    assert len(ours) == 333
    assert ours == {key: tuple(tensor.shape) for key, tensor in theirs.items()}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop(POS_EMBED), r"model\.visual\.pos_embed\.weight is missing"),
        (lambda w: w.update({"model.visual.extra": torch.zeros(2)}), r"model\.visual\.extra belongs to no module"),
        (lambda w: w.update({POS_EMBED: torch.zeros(16, 31)}), r"has shape \[16, 31\] where \[16, 32\] is expected"),
        (
            lambda w: [w.pop(n) for n in list(w) if "visual" in n],
            r"The vision tower \(model\.visual\.\*\) is missing",
        ),
        (
            lambda w: [w.pop(n) for n in list(w) if "visual.blocks.0" in n],
            r"is missing.*11 more problems: `onebox inspect",
        ),
    ],
    ids=["missing", "left over", "misshapen", "no tower", "many"],
)
def test_a_tower_that_is_not_whole_is_refused(tmp_path, change, sentence):
    weights = dict(case()[1])
    change(weights)
    save(tmp_path, weights)
    with pytest.raises(MismatchError, match=sentence):
        load_tower(tmp_path)


def test_a_flaw_of_the_text_weights_is_no_concern_of_the_tower(tmp_path):
    save(tmp_path, {name: tensor for name, tensor in case()[1].items() if "layers.1" not in name})
    assert load_tower(tmp_path).spec == SPEC.vision


def test_configs_that_cannot_have_images_are_refused(tmp_path):
    save(tmp_path, case()[1], {key: value for key, value in CONFIG.items() if key != "vision_config"})
    with pytest.raises(UnsupportedError, match="no vision_config: this model reads text only"):
        load_tower(tmp_path)
    save(tmp_path, case()[1], tiny_config(vision_config={**CONFIG["vision_config"], "out_hidden_size": 64}))
    with pytest.raises(MismatchError, match=r"out_hidden_size is 64 and text_config\.hidden_size is 128"):
        load_tower(tmp_path)
    with pytest.raises(UnsupportedError, match="reads text only"):
        positions_for(torch.arange(3), torch.tensor([[1, 2, 2]]), None, spec_from_config(TINY))


def test_a_tower_of_another_transformers_is_a_sentence(checkpoint, monkeypatch):
    def differs(*_, **__):
        raise RuntimeError("Missing key(s): merger.scale")

    monkeypatch.setattr(Qwen3_5MoeVisionModel, "load_state_dict", differs)
    with pytest.raises(MismatchError, match=r"another vision tower than Qwen3\.5's \(Missing key\(s\): merger\.scale"):
        load_tower(checkpoint)


def test_transformers_is_imported_only_when_a_tower_is():
    code = "import sys, onebox.model.reference_weights, onebox.model.vision; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# What does not fit together.


def test_pads_and_pixels_that_disagree_are_refused(checkpoint):
    weights, tokens, grid = case()[1], LAYOUTS["one image"].tokens, torch.tensor([[1, 4, 6]])
    with pytest.raises(MismatchError, match="6 image pad tokens for 5 image embeddings"):
        embeddings_for(SPEC, weights, tokens, torch.zeros(5, 128))
    with pytest.raises(MismatchError, match="0 video pad tokens for 1 video embeddings"):
        embeddings_for(SPEC, weights, tokens, torch.zeros(6, 128), torch.zeros(1, 128))
    with pytest.raises(MismatchError, match="at place 1 of the prompt belongs to no image"):
        positions_for(tokens, None, None, SPEC)
    with pytest.raises(MismatchError, match="fewer than 8 pad tokens at place 1"):
        positions_for(tokens, torch.tensor([[1, 4, 8]]), None, SPEC)
    with pytest.raises(MismatchError, match="belongs to no image"):
        positions_for(tokens, torch.tensor([[1, 4, 4]]), None, SPEC)
    with pytest.raises(MismatchError, match="more images or videos than the prompt has places for"):
        positions_for(tokens, grid.expand(2, 3), None, SPEC)
    tower = load_tower(checkpoint)
    with pytest.raises(MismatchError, match="23 patches came for grids of 24"):
        tower.encode(Pixels(torch.zeros(23, PATCH_SIZE), grid))
    with pytest.raises(MismatchError, match="not made of 2 x 2 squares"):
        tower.encode(Pixels(torch.zeros(15, PATCH_SIZE), torch.tensor([[1, 3, 5]])))
