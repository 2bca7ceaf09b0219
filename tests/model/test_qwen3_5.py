"""The model on its kernels against the float32 reference under the same weights, for every format of checkpoint.

On a machine without a GPU the kernels' twins run; `-m gpu` runs the same on the kernels themselves.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onebox.model import reference
from onebox.model.batch import Batch
from onebox.model.load import load_model
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.model.reference_weights import load_weights
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.shapes import SHAPES
from tests.model.opened import packed_model
from tests.synthetic import tiny_config, write_checkpoint

KINDS = ("bf16-fused", "fp8", "autoround", "gptq", "nvfp4-llmc", "nvfp4-modelopt", "modelopt-mixed", "packed-int3")
SLOTS = 3
PENDING = 5
# Largest difference in logits allowed, of the largest logit. bfloat16 activations round a hundred times on the way;
# float32 ones meet bfloat16 in the KV pages and in the experts.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-2}


@pytest.fixture(scope="module")
def smooth_checkpoints(tmp_path_factory) -> Path:
    """Checkpoints whose rows go to every expert: with a choice, a near-tie decided otherwise would hide all else."""
    root = tmp_path_factory.mktemp("smooth")
    for kind in KINDS:
        write_checkpoint(root / kind, kind, config=tiny_config(num_experts_per_tok=4))
    return root


class Session:
    """One sequence on the model: its slot, its pages (in an order of their own), and what it has seen."""

    def __init__(self, model: Qwen35, memory: Memory, slot: int, pages: list[int], first_position: int = 0) -> None:
        self.model, self.memory, self.slot, self.first_position = model, memory, slot, first_position
        self.pages = torch.tensor(pages)
        self.num_tokens = 0
        self.keep = 0

    def batch(self, token_ids: list[int]) -> Batch:
        device, count = self.model.device, len(token_ids)
        places = torch.arange(self.num_tokens, self.num_tokens + count)
        slots = self.pages[places // PAGE_TOKENS] * PAGE_TOKENS + places % PAGE_TOKENS
        as_int = {"dtype": torch.int32, "device": device}
        cu_rows, own = torch.tensor([0, count], **as_int), torch.tensor([self.slot], **as_int)
        return Batch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=(self.first_position + places).expand(3, -1).to(device),
            cu_rows=cu_rows,
            slots=own,
            num_accepted=torch.tensor([self.keep], **as_int),
            seen=torch.tensor([self.num_tokens + count], **as_int),
            page_table=self.pages[None].to(**as_int),
            slot_mapping=slots.to(device),
            saves=torch.full((count,), -1, **as_int),
        )

    def prefill(self, token_ids: list[int]) -> torch.Tensor:
        hidden = self.model.prefill(self.batch(token_ids), self.memory)
        self.num_tokens += len(token_ids)
        return hidden

    def step(self, token_ids: list[int], keep: int) -> torch.Tensor:
        """Verifies `token_ids`, of which `keep` will have been accepted."""
        hidden = self.model.decode(self.batch(token_ids), self.memory)
        self.num_tokens += keep
        self.keep = keep
        return hidden


def start(
    model: Qwen35,
    kv: str = "bf16",
    slot: int = 1,
    pages: tuple[int, ...] = (4, 1, 3, 0, 2, 5),
    first_position: int = 0,
) -> Session:
    shape = MemoryShape(KVFormat.parse(kv), 6, SLOTS, 0, PENDING, with_mtp=model.mtp is not None)
    memory = Memory.allocate(model.spec, shape, model.dtype, model.device)
    return Session(model, memory, slot, list(pages), first_position)


def expected_logits(directory: Path, token_ids: list[int], first_position: int = 0) -> torch.Tensor:
    loaded = load_weights(directory)
    cache, positions = reference.Cache.empty(loaded.spec), reference.text_positions(first_position, len(token_ids))
    hidden = reference.forward(loaded.spec, loaded.weights, torch.tensor(token_ids), cache, positions)
    return reference.lm_head(loaded.spec, loaded.weights, hidden)


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((found.cpu() - expected).abs().max() / expected.abs().max())
    assert error <= TOLERANCE[dtype], f"off by {error:.2e} of the largest"


PROMPT = [(7 * i * i + 3 * i + 1) % 480 for i in range(150)]


def check_model(directory: Path, device: torch.device, dtype: torch.dtype, first_position: int = 0) -> None:
    """A prompt in two pieces, then steps of one and of three rows, some of them rejected: every row's logits."""
    with torch.inference_mode():
        expected = expected_logits(directory, PROMPT, first_position)
        model = load_model(directory, device, dtype)
        session = start(model, first_position=first_position)
        assert_near(model.logits(session.prefill(PROMPT[:128])[-64:]), expected[64:128], dtype)
        assert_near(model.logits(session.prefill(PROMPT[128:140])), expected[128:140], dtype)
        assert_near(model.logits(session.step([PROMPT[140]], keep=1)), expected[140:141], dtype)
        wrong = [(token + 1) % 480 for token in PROMPT[141:144]]
        assert_near(model.logits(session.step([PROMPT[141], *wrong[1:]], keep=1))[:1], expected[141:142], dtype)
        assert_near(model.logits(session.step(PROMPT[142:145], keep=3)), expected[142:145], dtype)
        assert_near(model.logits(session.step(PROMPT[145:150], keep=5)), expected[145:150], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_reference_on_the_cpu(smooth_checkpoints, kind, dtype):
    check_model(smooth_checkpoints / kind, torch.device("cpu"), dtype)


def test_logits_of_three_bits_in_tiles_are_those_of_the_reference(smooth_checkpoints):
    """The kernels' layouts through their twins: mixed tiles of experts, linears of 3 bits as INT4."""
    directory = smooth_checkpoints / "packed-int3"
    with torch.inference_mode():
        expected = expected_logits(directory, PROMPT)
        model = packed_model(directory)
        session = start(model)
        assert_near(model.logits(session.prefill(PROMPT[:128])[-64:]), expected[64:128], torch.float32)
        assert_near(model.logits(session.step(PROMPT[128:131], keep=3)), expected[128:131], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_reference_on_the_gpu(smooth_checkpoints, kind):
    check_model(smooth_checkpoints / kind, torch.device("cuda"), torch.bfloat16)


@pytest.fixture(scope="module")
def stretched_checkpoint(tmp_path_factory) -> Path:
    """With the published rotation, base and stretch to 1,010,000 tokens."""
    published = SHAPES["qwen3.5-122b-a10b"]["text_config"]["rope_parameters"]
    stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}
    rope = {**published, "partial_rotary_factor": 1.0, **stretch}
    config = tiny_config(num_experts_per_tok=4, rope_parameters=rope)
    return write_checkpoint(tmp_path_factory.mktemp("stretched") / "model", "autoround", config=config)


@pytest.mark.parametrize("first_position", [0, 1_009_850])
def test_logits_with_yarn_are_those_of_the_reference_up_to_a_million_tokens(stretched_checkpoint, first_position):
    check_model(stretched_checkpoint, torch.device("cpu"), torch.float32, first_position)


@pytest.mark.gpu
@pytest.mark.parametrize("first_position", [0, 1_009_850])
def test_logits_with_yarn_are_those_of_the_reference_on_the_gpu(stretched_checkpoint, first_position):
    check_model(stretched_checkpoint, torch.device("cuda"), torch.bfloat16, first_position)


def test_drafts_with_yarn_are_those_of_the_reference(stretched_checkpoint):
    check_drafts(stretched_checkpoint, torch.device("cpu"), torch.bfloat16)


@pytest.mark.gpu
def test_drafts_with_yarn_are_those_of_the_reference_on_the_gpu(stretched_checkpoint):
    check_drafts(stretched_checkpoint, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("kv", ["fp8", "turboquant_k8v4", "turboquant"])
def test_packed_kv_stays_near_the_reference(smooth_checkpoints, kv):
    """Four bits a number cost more than rounding does; what is checked is that pages are read as they were written."""
    directory = smooth_checkpoints / "bf16-fused"
    with torch.inference_mode():
        model = load_model(directory, torch.device("cpu"), torch.float32)
        session = start(model, kv)
        session.prefill(PROMPT[:128])
        found = model.logits(session.step(PROMPT[128:131], keep=3))
        expected = expected_logits(directory, PROMPT[:131])[128:]
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= {"fp8": 1.5e-2, "turboquant_k8v4": 5e-2, "turboquant": 8e-2}[kv]


def check_features(directory: Path, device: torch.device, dtype: torch.dtype) -> None:
    """What a block drafter reads, of a prompt and of decode steps: the reference's stream behind the tapped layers."""
    loaded, streams = load_weights(directory), dict[int, torch.Tensor]()
    tapped = (0, 2, loaded.spec.num_hidden_layers - 1)
    with torch.inference_mode():
        reference.forward(
            loaded.spec, loaded.weights, torch.tensor(PROMPT), reference.Cache.empty(loaded.spec), taps=streams
        )
        expected = torch.cat([streams[layer] for layer in tapped], dim=-1)
        # Any drafter: only its taps are read here.
        model = replace(load_model(directory, device, dtype), drafter=object(), tap_ids=tapped)
        session = start(model)
        prompt = model.prefill_tapped(session.batch(PROMPT[:128]), session.memory)[1]
        session.num_tokens = 128
        found = [model.decode_tapped(session.batch(PROMPT[128:131]), session.memory)[1]]
        session.num_tokens, session.keep = 131, 3
        found.append(model.decode_tapped(session.batch(PROMPT[131:132]), session.memory)[1])
    assert_near(prompt.features(dtype), expected[:128], dtype)
    assert_near(torch.cat([taps.features(dtype) for taps in found]), expected[128:132], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_of_a_block_drafter_are_the_references_streams(smooth_checkpoints, dtype):
    check_features(smooth_checkpoints / "bf16-fused", torch.device("cpu"), dtype)


@pytest.mark.gpu
def test_features_of_a_block_drafter_are_the_references_streams_on_the_gpu(smooth_checkpoints):
    check_features(smooth_checkpoints / "autoround", torch.device("cuda"), torch.bfloat16)


def check_drafts(directory: Path, device: torch.device, dtype: torch.dtype) -> None:
    """The head over a prompt, then three chained drafts, against the reference's head fed the same tokens."""
    loaded = load_weights(directory)
    spec, weights = loaded.spec, loaded.weights
    with torch.inference_mode():
        cache, rows = reference.Cache.empty(spec), reference.KVRows.empty(spec)
        hidden = reference.forward(spec, weights, torch.tensor(PROMPT[:100]), cache)
        expected = [reference.mtp_forward(spec, weights, torch.tensor(PROMPT[1:101]), hidden, rows)]
        for token in PROMPT[101:104]:
            expected.append(reference.mtp_forward(spec, weights, torch.tensor([token]), expected[-1][-1:], rows))
        model = load_model(directory, device, dtype)
        session = start(model)
        found = session.prefill(PROMPT[:100])
        session.num_tokens = 1  # the head's entries stand at the place of the token they depend on
        pages = session.memory.mtp
        model.prefill_draft_kv(session.batch(PROMPT[1:97]), found[:96], pages)
        session.num_tokens = 97
        found = model.draft(session.batch(PROMPT[97:101]), found[96:], pages)
        assert_near(model.logits(found), reference.lm_head(spec, weights, expected[0][96:]), dtype)
        session.num_tokens = 101
        for token, wanted in zip(PROMPT[101:104], expected[1:], strict=True):
            found = model.draft(session.batch([token]), found[-1:], pages)
            session.num_tokens += 1
            assert_near(model.logits(found), reference.lm_head(spec, weights, wanted), dtype)


@pytest.mark.parametrize("kind", ["bf16-fused", "fp8"])
def test_chained_drafts_are_those_of_the_reference(smooth_checkpoints, kind):
    check_drafts(smooth_checkpoints / kind, torch.device("cpu"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16-fused", "fp8"])
def test_chained_drafts_are_those_of_the_reference_on_the_gpu(smooth_checkpoints, kind):
    check_drafts(smooth_checkpoints / kind, torch.device("cuda"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["bf16", "fp8", "turboquant"])
@pytest.mark.parametrize("kind", ["bf16-fused", "autoround", "fp8", "nvfp4-llmc", "packed-int3"])
def test_a_rows_bits_do_not_depend_on_how_the_work_was_cut(checkpoints, kind, kv):
    """Prompts split at multiples of 64, steps of one, two or five rows, rejected drafts among them: the same bits."""
    with torch.inference_mode():
        model = load_model(checkpoints / kind, torch.device("cuda"), torch.bfloat16)
        whole = start(model, kv)
        prompt = whole.prefill(PROMPT[:140])
        steps = torch.cat([whole.step([token], keep=1) for token in PROMPT[140:150]])
        other = start(model, kv, slot=2, pages=(0, 5, 2, 1, 4, 3))
        pieces = torch.cat([other.prefill(PROMPT[:64]), other.prefill(PROMPT[64:128]), other.prefill(PROMPT[128:140])])
        assert torch.equal(pieces, prompt)
        kept = [other.step([PROMPT[140], 5, 6, 7], keep=1)[:1], other.step(PROMPT[141:146], keep=5)]
        kept += [other.step([*PROMPT[146:148], 9], keep=2)[:2], other.step(PROMPT[148:150], keep=2)]
        assert torch.equal(torch.cat(kept), steps)
