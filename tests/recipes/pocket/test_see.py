"""A toy learns to see: data, some steps, export, and an answer about a picture that transformers agrees with."""

import io
import itertools
from random import Random

import pytest
import torch

import onebox
from onebox.spec.model import read_config
from onebox.text.chat import ChatTemplate
from onebox.text.patches import PictureReader
from recipes.pocket import see
from recipes.pocket.evaluation.pictures import picture_task
from recipes.pocket.export import export
from recipes.pocket.pictures.workloads import PICTURES
from recipes.pocket.synthetic.workloads import prompt_text
from recipes.pocket.training.checkpoint import read_progress
from recipes.pocket.training.schedule import RunClock
from tests.recipes.pocket.toy_pictures import source


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The exported toy after about 20 steps in two processes."""
    work = tmp_path_factory.mktemp("see")
    looks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunClock, "elapsed", property(lambda _: 0.05 * next(looks)))  # the same steps on any machine
        arguments = ["--toy", "--minutes", "0.07", "--data", str(work), "--out", str(work / "seen")]
        assert see.main([*arguments, "--limit-seconds", "1.5"]) == 0
        assert 0 < read_progress(work / "seen") < 1
        assert see.main([*arguments, "--resume"]) == 0
    assert read_progress(work / "seen") == 1
    export(work / "seen", work / "text")
    return work / "text"


def test_the_engine_answers_about_a_picture_as_transformers_does(toy):
    seen = PICTURES["short line"](Random(1), source())
    text = prompt_text(seen.example, ChatTemplate.load(toy))
    params = onebox.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    prompt = {"prompt": text, "multi_modal_data": {"image": seen.drawing.image()}}
    with onebox.LLM(toy, dtype="float32") as llm:
        [answer] = llm.generate([prompt], params)
        [again] = llm.generate([prompt], params)
        [blind] = llm.generate([{**prompt, "multi_modal_data": {"image": _inverted(seen.drawing.image())}}], params)
    assert (answer.token_ids, answer.logprobs) == (again.token_ids, again.logprobs)
    assert answer.logprobs != blind.logprobs
    theirs = _transformers_logprobs(toy, seen.drawing.image(), answer.prompt_token_ids, answer.token_ids)
    ours = torch.tensor([entry.logprob for entry in answer.logprobs])
    assert (ours - theirs).abs().max() < 0.05  # keys and values in bfloat16 stand between the two


def test_pictures_are_scored_by_fields_and_characters(toy):
    with onebox.LLM(toy, dtype="float32") as llm:
        found = [picture_task(llm, toy, toy / "fonts", name, 2, 4) for name in ("line", "table")]
    assert found[0].scores.keys() == {"exact", "characters"}
    assert found[0].name == "picture: line"
    assert "fields" in found[1].scores | found[0].scores
    assert all(task.num == 2 and task.mean_prompt_tokens > 20 and task.scores["exact"] == 0 for task in found)


def _inverted(image):
    return image.point(lambda value: 255 - value)


def _transformers_logprobs(directory, image, prompt, token_ids):
    """Of `token_ids` behind the prompt; the patches are ours, since their processor needs torchvision."""
    from transformers import Qwen3_5MoeForConditionalGeneration

    model = Qwen3_5MoeForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    spec = read_config(directory)
    picture = PictureReader.load(directory, spec).open("image", _png(image))
    ids = torch.tensor([[*prompt, *token_ids]])
    with torch.no_grad():
        out = model(
            ids,
            pixel_values=torch.from_numpy(picture.read()),
            image_grid_thw=torch.tensor([picture.grid]),
            mm_token_type_ids=(ids == spec.image_token_id).int(),
        )
    logits = out.logits[0].log_softmax(-1)[-len(token_ids) - 1 : -1]
    return logits.gather(1, ids[0, -len(token_ids) :, None])[:, 0]


def _png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
