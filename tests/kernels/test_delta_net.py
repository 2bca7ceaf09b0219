"""DeltaNet's promises: bits do not tell how tokens were grouped, which were rejected, or who else was there."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from onebox.kernels.delta_net import reference
from onebox.kernels.delta_net.cases import QWEN_122B, TINY, DeltaShape, delta_inputs
from onebox.kernels.delta_net.memory import DeltaPool, DeltaWeights
from onebox.model.reference import DeltaState, gated_delta_net
from onebox.spec.model import spec_from_config
from tests.conftest import HAS_GPU
from tests.kernels.catalogue import forms
from tests.kernels.tolerance import assert_same
from tests.synthetic import random_weights, tiny_config

CPU = torch.device("cpu")
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
in_the_interpreter = pytest.mark.skipif(HAS_GPU, reason="the GPU runs the full shapes")


def copy_of(pool: DeltaPool) -> DeltaPool:
    return DeltaPool(*(part.clone() for part in pool))


def assert_equal_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def walk(module, given, steps):
    """Outputs of one sequence's steps (its rows' numbers, how many pending tokens are accepted), its final state."""
    pool, device = copy_of(given["pool"]), given["qkv"].device
    outputs = []
    for rows, num_accepted in steps:
        outputs.append(
            forms(module).delta_net_step(
                *(given[name][rows] for name in ("qkv", "a", "b")),
                given["weights"],
                pool,
                torch.tensor([0, len(rows)], dtype=torch.int32, device=device),
                given["slots"],
                torch.tensor([num_accepted], dtype=torch.int32, device=device),
            )
        )
    slot = int(given["slots"][0])
    return outputs, (pool.matrices[slot], pool.conv_rows[slot])


def grouped(*sizes):
    """Steps of so many tokens, all of them accepted; a last one without rows brings the state up to date."""
    steps, first, num_accepted = [], 0, 0
    for size in (*sizes, 0):
        steps.append((list(range(first, first + size)), num_accepted))
        first, num_accepted = first + size, size
    return steps


def check_grouping(module, device, layer, dtype, state_dtype=torch.float32):
    given = delta_inputs(device, layer, (6,), dtype, num_accepted=(0,), state_dtype=state_dtype)
    outputs, state = walk(module, given, grouped(1, 1, 1, 1, 1, 1))
    for sizes in [(3, 3), (1, 5), (2, 1, 3)]:
        found, found_state = walk(module, given, grouped(*sizes))
        assert torch.equal(torch.cat(found), torch.cat(outputs)), sizes
        assert_equal_bits(found_state, state)


def check_rejection(module, device, layer, dtype, state_dtype=torch.float32):
    """Rows 0..3 are the sequence; 4, 5 and 6 are drafts that were rejected."""
    given = delta_inputs(device, layer, (7,), dtype, num_accepted=(0,), state_dtype=state_dtype)
    plain, state = walk(module, given, grouped(1, 1, 1, 1))
    drafted, drafted_state = walk(module, given, [([0, 4, 5], 0), ([1, 2, 6], 1), ([5], 0), ([1, 2, 3], 0), ([], 3)])
    assert torch.equal(drafted[0][0], plain[0][0])
    assert torch.equal(drafted[1][:2], torch.cat(plain[1:3]))
    assert torch.equal(drafted[3], torch.cat(plain[1:4]))
    assert_equal_bits(drafted_state, state)


def alone(given, sequence):
    """The arguments of one of the batch's sequences, with a pool of its own."""
    first, end = given["cu_rows"][sequence : sequence + 2].tolist()
    only = {name: given[name][first:end] for name in ("qkv", "a", "b", "saves") if name in given}
    only |= {name: given[name][sequence : sequence + 1] for name in ("slots", "num_accepted") if name in given}
    edges = torch.tensor([0, end - first], dtype=torch.int32, device=given["qkv"].device)
    return {**only, "cu_rows": edges, "weights": given["weights"], "pool": copy_of(given["pool"])}, slice(first, end)


def check_company(module, device, op, sequences, **inputs):
    """Each of `sequences` gives the same bits alone as in the batch, and a slot that is not named stays as it was."""
    given = delta_inputs(device, **inputs)
    before = copy_of(given["pool"])
    function = getattr(forms(module), op)
    together = function(**{**given, "pool": (pool := copy_of(before))})
    assert_equal_bits([part[0] for part in pool], [part[0] for part in before])
    for sequence in sequences:
        only, rows = alone(given, sequence)
        assert torch.equal(function(**only), together[rows])
        saved = [slot for slot in only["saves"].tolist() if slot >= 0] if "saves" in only else []
        for slot in (int(given["slots"][sequence]), *saved):
            assert_equal_bits([part[slot] for part in only["pool"]], [part[slot] for part in pool])


def check_split_prefill(module, device, layer, dtype, state_dtype=torch.float32):
    """200 tokens at once, and in two calls that meet at a multiple of 64."""
    results = []
    for sizes in [(200,), (64, 136), (128, 72)]:
        given = delta_inputs(device, layer, (200,), dtype, state_dtype=state_dtype)
        outputs, first = [], 0
        for size in sizes:
            rows = {name: given[name][first : first + size] for name in ("qkv", "a", "b", "saves")}
            edges = torch.tensor([0, size], dtype=torch.int32, device=device)
            outputs.append(forms(module).delta_net_prefill(**{**given, **rows, "cu_rows": edges}))
            first += size
        results.append([torch.cat(outputs), *given["pool"]])
    for result in results[1:]:
        assert_equal_bits(result, results[0])


def check_norm_rows(module, device, heads, value_dim, counts):
    draw = torch.Generator().manual_seed(heads)
    o = torch.randn(max(counts), heads, value_dim, generator=draw).to(device, torch.bfloat16)
    z = torch.randn(max(counts), heads * value_dim, generator=draw).to(device, torch.bfloat16)
    weight = torch.randn(value_dim, generator=draw).to(device)
    gated_norm = forms(module).gated_norm
    for count in counts:
        together = gated_norm(o[:count], z[:count], weight, 1e-6)
        for row in {0, 1, count - 1}:
            assert torch.equal(gated_norm(o[row : row + 1], z[row : row + 1], weight, 1e-6)[0], together[row])


@both
@in_the_interpreter
def test_grouping_tokens_into_steps_does_not_change_a_bit(module):
    check_grouping(module, CPU, TINY, torch.bfloat16, torch.bfloat16)


@both
@in_the_interpreter
def test_a_rejected_token_leaves_no_trace(module):
    check_rejection(module, CPU, TINY, torch.float32)


@both
@in_the_interpreter
def test_a_sequence_does_not_depend_on_its_company(module):
    step = {"lengths": (1, 3, 2), "num_accepted": (2, 0, 1)}
    check_company(module, CPU, "delta_net_step", range(3), shape=TINY, dtype=torch.bfloat16, **step)
    check_company(module, CPU, "delta_net_prefill", range(2), shape=TINY, dtype=torch.float32, lengths=(2, 65))


def check_saved_states(module, device, layer, dtype, state_dtype=torch.float32):
    """A saved state is the one that a prompt of so many tokens ends with."""
    given = delta_inputs(device, layer, (200, 70), dtype, state_dtype=state_dtype)
    saves = {row: int(slot) for row, slot in enumerate(given["saves"]) if slot >= 0}
    assert set(saves) == {63, 191, 263}
    pool = copy_of(given["pool"])
    forms(module).delta_net_prefill(**{**given, "pool": pool})
    for row, save in saves.items():
        sequence = int(row >= 200)
        only, _ = alone(given, sequence)
        count = row + 1 - 200 * sequence
        rows = {name: only[name][:count] for name in ("qkv", "a", "b", "saves")}
        edges = torch.tensor([0, count], dtype=torch.int32, device=device)
        forms(module).delta_net_prefill(**{**only, **rows, "cu_rows": edges})
        slot = int(only["slots"])
        for part, expected in zip(pool[:2], only["pool"][:2], strict=True):
            assert torch.equal(part[save], expected[slot]), row


@both
@in_the_interpreter
def test_a_saved_state_is_the_one_that_a_shorter_prompt_ends_with(module):
    check_saved_states(module, CPU, replace(TINY, num_heads=1), torch.float32)


@both
@in_the_interpreter
def test_a_prompt_split_at_chunks_gives_the_bits_of_the_whole(module):
    check_split_prefill(module, CPU, replace(TINY, num_heads=1), torch.float32, torch.float16)


@pytest.mark.parametrize("module", ["reference", "cpu"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_the_promises_hold_for_states_of_16_bits(module, state_dtype):
    """The kernels' tests above have some promises with each dtype; the GPU's have all of them."""
    check_grouping(module, CPU, TINY, torch.bfloat16, state_dtype)
    check_rejection(module, CPU, TINY, torch.float32, state_dtype)
    check_split_prefill(module, CPU, TINY, torch.float32, state_dtype)
    check_saved_states(module, CPU, TINY, torch.bfloat16, state_dtype)


@both
@in_the_interpreter
def test_a_row_of_the_gated_norm_does_not_depend_on_its_company(module):
    check_norm_rows(module, CPU, 3, 20, (2, 3, 5))


def test_a_state_of_any_size_is_carried_with_the_same_bits(device):
    """Without new values a column of the state is only read and faded: times a power of two, so is all that comes."""
    powers = torch.linspace(-60, 60, TINY.value_dim).round()
    results = []
    for factor in (torch.ones(TINY.value_dim), 2.0**powers):
        given = delta_inputs(device, TINY, (70,), torch.float32)
        values = slice(2 * TINY.num_key_heads * TINY.key_dim, None)
        given["qkv"][:, values] = 0
        given["pool"].conv_rows[..., values] = 0
        given["a"][:] = -5.0  # so little is forgotten that nothing leaves float32's range
        given["pool"].matrices.mul_(factor.to(device))
        out = forms("kernel").delta_net_prefill(**given)
        slot = int(given["slots"][0])
        results.append([out / factor.to(device), given["pool"].matrices[slot] / factor.to(device)])
    assert bool((results[0][0] != 0).any())
    assert_equal_bits(*results)


def test_a_token_said_again_and_again_is_written_once(device):
    """Equal keys, all written and nothing forgotten: the hardest triangular system, whose inverse has two diagonals."""
    results = []
    for module, where in (("reference", CPU), ("kernel", device)):
        given = delta_inputs(where, TINY, (130,), torch.float32)
        given["qkv"][:] = given["qkv"][:1].clone()
        given["a"][:], given["b"][:] = -30.0, 30.0
        out = forms(module).delta_net_prefill(**given)
        results.append([out.cpu(), given["pool"].matrices.cpu()])
    assert_same(results[1], results[0], operation="delta_net_prefill")


def test_the_twins_keep_their_promises_with_wide_heads():
    layer = DeltaShape(2, 4, 128, 128, 6)
    check_grouping("reference", CPU, layer, torch.bfloat16)
    check_rejection("reference", CPU, layer, torch.bfloat16)
    check_split_prefill("reference", CPU, layer, torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 150])
def test_the_chunked_twin_is_the_recurrence(num_tokens):
    layer = DeltaShape(2, 4, 32, 48, 150)
    given = delta_inputs(CPU, layer, (num_tokens,), torch.float32, num_accepted=(0,))
    outputs, state = walk("reference", given, grouped(num_tokens))
    given["saves"] = torch.full_like(given.pop("num_accepted"), -1).expand(num_tokens)
    assert_same(reference.delta_net_prefill(**given), outputs[0])
    slot = int(given["slots"][0])
    assert_same([given["pool"].matrices[slot], given["pool"].conv_rows[slot]], list(state))


def test_the_twins_are_the_models_delta_net():
    spec = spec_from_config(tiny_config())
    prefix = f"{spec.text_prefix}layers.0.linear_attn."
    w = {name.removeprefix(prefix): x.float() for name, x in random_weights(spec).items() if name.startswith(prefix)}
    x = torch.randn(70, spec.hidden_size, generator=torch.Generator().manual_seed(3))
    state = DeltaState.empty(spec)
    expected = torch.cat([gated_delta_net(spec, w, part, state) for part in x.split([66, 1, 1, 1, 1])])

    weights = DeltaWeights(w["conv1d.weight"].squeeze(1), w["A_log"], w["dt_bias"])
    pool = DeltaPool(
        torch.zeros(1, *state.matrices.shape),
        torch.zeros(1, *state.conv_rows.shape),
        torch.empty(1, 4, spec.conv_dim),
        torch.empty(1, 4, 2, spec.linear_num_value_heads),
    )
    qkv, a, b, z = (F.linear(x, w[f"in_proj_{name}.weight"]) for name in ("qkv", "a", "b", "z"))
    edges, slots, none = (torch.tensor(data, dtype=torch.int32) for data in ([0, 66], [0], [0]))
    unsaved = torch.full((66,), -1, dtype=torch.int32)
    mixed = [reference.delta_net_prefill(qkv[:66], a[:66], b[:66], weights, pool, edges, slots, unsaved)]
    edges = torch.tensor([0, 4], dtype=torch.int32)
    mixed.append(reference.delta_net_step(qkv[66:], a[66:], b[66:], weights, pool, edges, slots, none))
    gated = reference.gated_norm(torch.cat(mixed), z, w["norm.weight"], spec.rms_norm_eps)
    assert_same(F.linear(gated, w["out_proj.weight"]), expected)

    nothing = torch.zeros(2, dtype=torch.int32)
    reference.delta_net_step(qkv[:0], a[:0], b[:0], weights, pool, nothing, slots, edges[1:])
    assert_same([pool.matrices[0], pool.conv_rows[0]], [state.matrices, state.conv_rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_promises_hold_on_the_gpu(device, dtype, state_dtype):
    check_grouping("kernel", device, QWEN_122B, dtype, state_dtype)
    check_rejection("kernel", device, QWEN_122B, dtype, state_dtype)
    check_split_prefill("kernel", device, QWEN_122B, dtype, state_dtype)
    check_saved_states("kernel", device, QWEN_122B, dtype, state_dtype)
    check_norm_rows("kernel", device, 64, 128, (2, 3, 8, 17, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 3, 8, 17, 64])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_depend_on_its_company_on_the_gpu(device, count, state_dtype):
    layer, some = replace(QWEN_122B, max_step_tokens=4), {0, 1, count - 1}
    lengths = tuple(1 + s % 4 for s in range(count))
    num_accepted = tuple((s + 2) % 5 for s in range(count))
    inputs = {"shape": layer, "dtype": torch.bfloat16, "lengths": lengths, "state_dtype": state_dtype}
    check_company("kernel", device, "delta_net_step", some, **inputs, num_accepted=num_accepted)
    inputs["lengths"] = tuple(1 + 37 * s % 150 for s in range(count))
    check_company("kernel", device, "delta_net_prefill", some, **inputs)
