"""The equality gate's questions about pictures, and a tower that encodes them.

Some begin alike: the same picture with other questions, and other pictures under the same token ids, which the prefix
cache must tell apart.
"""

from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import torch

from onebox.engine.request import Pictures, Vision
from onebox.model.qwen3_5 import Qwen35
from onebox.model.vision import Tower
from onebox.spec.model import spec_from_config
from tests.engine.gate_prompts import BOUNDARY, WAYS, Case, sampling, text
from tests.synthetic import tiny_config

IMAGE, VIDEO = 268, 269
"""Pad tokens: bytes and the tokens of `gate_prompts` end before them."""
_VISION = spec_from_config(tiny_config()).vision
_FIRST_SEED = 1000
# Parts of a prompt: tokens of text, or a kind of picture, its grid of patches and the seed of its pixels.
_CHART, _OTHER_CHART = (IMAGE, (1, 12, 8), 1), (IMAGE, (1, 12, 8), 2)
_PAGE, _CLIP = (IMAGE, (1, 24, 20), 3), (VIDEO, (2, 8, 8), 4)
_PROMPTS = {
    "a picture": (20, _CHART, 30),
    "the same picture and another question": (20, _CHART, 31),
    "another picture in the same place": (20, _OTHER_CHART, 30),
    "a picture at a page's edge": (40, _CHART, 1),
    "nothing but a picture": (1, _CHART),
    "a picture over several pages": (63, _PAGE, 70),
    "two pictures": (5, _OTHER_CHART, 3, _CHART, 70),
    "a video and a picture": (90, _CLIP, 12, _CHART, 9),
}


@cache
def picture_cases() -> tuple[Case, ...]:
    return tuple(
        Case(
            name,
            "pictures",
            _prompt(parts),
            sampling(_FIRST_SEED + place, WAYS[place % len(WAYS)]),
            vision=_vision(parts),
        )
        for place, (name, parts) in enumerate(_PROMPTS.items())
    )


def with_tower(model: Qwen35) -> tuple[Qwen35, Tower]:
    """The model as one that sees, and a random tower of transformers' for it."""
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    vision = replace(_VISION, out_hidden_size=model.spec.hidden_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = Qwen3_5MoeVisionModel(Qwen3_5MoeVisionConfig(**vars(vision))).eval()
    spec = replace(model.spec, vision=vision, image_token_id=IMAGE, video_token_id=VIDEO)
    return replace(model, spec=spec), Tower(vision, tower.to(model.device))


def _prompt(parts) -> tuple[int, ...]:
    ids: list[int] = [BOUNDARY]
    for place, part in enumerate(parts):
        if isinstance(part, int):
            ids += text(part, f"beside pictures {place}")
            continue
        pad, (time, height, width), _ = part
        # A video has a timestamp before each of its steps.
        for step in range(time):
            ids += [*(text(3, f"time {step}") if pad == VIDEO else ()), *[pad] * (height * width // 4)]
    return tuple(ids)


def _vision(parts) -> Vision:
    shown = {pad: [part for part in parts if not isinstance(part, int) and part[0] == pad] for pad in (IMAGE, VIDEO)}
    return Vision(*(_pictures(shown[pad]) for pad in (IMAGE, VIDEO)))


def _pictures(parts) -> Pictures | None:
    if not parts:
        return None
    width = 3 * _VISION.temporal_patch_size * _VISION.patch_size**2
    pixels = [np.random.default_rng(seed).standard_normal((prod(grid), width)) for _, grid, seed in parts]
    return Pictures(np.concatenate(pixels).astype(np.float32), tuple(grid for _, grid, _ in parts))
