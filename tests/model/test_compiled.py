"""The pieces of compiled layers against numpy and torch, and the way they are compiled."""

import errno
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.model.compiled import jit, threads
from onebox.model.compiled.arithmetic import add_norm, dot, exp, product, rounded, sigmoid, silu, widen
from onebox.model.compiled.attention import Projected, attend
from onebox.model.compiled.delta_net import _read_state, _update_state
from onebox.model.compiled.jit import compiled as as_machine_code
from onebox.model.compiled.states import narrow_state, widen_state

ULP = float(np.finfo(np.float32).eps)
STATE_DTYPES = [(torch.bfloat16, np.uint16), (torch.float16, np.int16)]


@as_machine_code
def every(function_id, x, out):
    for i in range(len(x)):
        if function_id == 0:
            out[i] = exp(x[i])
        elif function_id == 1:
            out[i] = sigmoid(x[i])
        else:
            out[i] = silu(x[i])


@as_machine_code
def there_and_back(x, narrow, out):
    for i in range(len(x)):
        narrow[i] = rounded(x[i], narrow)
        out[i] = widen(narrow[i])


@as_machine_code
def dot_of(a, b):
    return dot(a, b)


@as_machine_code
def look_up(asked, state, found):
    _read_state(asked, state, found)


@as_machine_code
def take_in(before, state, key, wanted, decay, asked, found, stored):
    _update_state(before, state, key, wanted, decay, asked, found, stored)


@as_machine_code
def through_state(x, stored, out):
    narrow_state(x, stored)
    out[:] = widen_state(stored)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16 numbers."""
    return torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()


def as_float32(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


def applied(function_id: int, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    every(function_id, x, out)
    return out


def test_exp_is_within_two_units_in_the_last_place():
    x = np.concatenate([np.linspace(-86.9, 87.9, 200_001), np.linspace(-1, 1, 100_001)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(applied(0, x) - exact) / exact) < 2 * ULP


def test_exp_of_what_is_too_large_or_no_number_is_told_apart():
    found = applied(0, np.array([math.nan, 1000, math.inf, -1000, -math.inf], dtype=np.float32))
    assert math.isnan(found[0])
    assert (found[1:3] > 1e38).all()
    assert (found[3:] < 1e-37).all()


def test_sigmoid_and_silu_are_those_of_torch():
    x = torch.linspace(-30, 30, 10_001)
    for function_id, theirs in ((1, torch.sigmoid), (2, torch.nn.functional.silu)):
        expected = theirs(x.double())
        assert float((torch.from_numpy(applied(function_id, x.numpy())) - expected).abs().max()) < 2e-6


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them(numbers):
    x = torch.tensor(numbers, dtype=torch.float32)
    narrow, out = np.empty(len(x), dtype=np.uint16), np.empty(len(x), dtype=np.float32)
    there_and_back(x.numpy(), narrow, out)
    expected = x.to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(out).nan_to_num(1.5), expected.float().nan_to_num(1.5))
    there_and_back(x.numpy(), wide := np.empty(len(x), dtype=np.float32), out)
    assert np.array_equal(wide, x.numpy(), equal_nan=True)


@pytest.mark.parametrize("length", [1, 7, 8, 64, 250])
def test_a_norm_is_that_of_numpy(length):
    draw = np.random.default_rng(length)
    added, residual = (draw.standard_normal((3, length)).astype(np.float32) for _ in range(2))
    weight = draw.standard_normal(length).astype(np.float32)
    normed, total = add_norm(added, residual, weight, 1e-6)
    wide = added.astype(np.float64) + residual
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight)
    assert np.array_equal(total, added + residual)
    assert np.allclose(normed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 79, 80, 131, 256])
def test_a_dot_product_is_that_of_numpy(length):
    a, b = drawn(length, 2, length)
    narrow = as_bfloat16(b)
    for found, other in ((dot_of(a, b), b), (dot_of(a, narrow), as_float32(narrow))):
        exact = float(a.astype(np.float64) @ other)
        assert abs(found - exact) <= length * ULP * float(np.abs(a) @ np.abs(other))


@pytest.mark.parametrize("shape", [(64, 64), (24, 40), (3, 33), (5, 7)])
def test_a_state_takes_a_key_in_and_then_holds_what_is_found_under_others(shape):
    before, key, wanted = drawn(1, *shape), drawn(2, shape[0]), drawn(3, shape[1])
    asked, found, again = drawn(4, 2, shape[0]), drawn(5, 2, shape[1]), drawn(6, 2, shape[1])
    state, decay = np.full(shape, np.nan, dtype=np.float32), np.float32(0.75)
    take_in(before, state, key, wanted, decay, asked, found, state)
    exact = before.astype(np.float64) * decay + np.outer(key, wanted)
    assert np.allclose(state, exact, rtol=1e-5, atol=1e-6)
    assert np.allclose(found, asked @ exact, rtol=1e-4, atol=1e-5)
    look_up(asked, state, again)
    assert np.array_equal(found, again), "one step later the same bits are found"
    take_in(before, before, key, wanted, decay, asked, found, before)
    assert np.array_equal(before, state), "in place or beside it"


@pytest.mark.parametrize(("dtype", "stored_dtype"), STATE_DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (3, 33)])
def test_a_state_of_16_bits_is_rounded_before_anything_is_found_in_it(shape, dtype, stored_dtype):
    before, key, wanted = drawn(1, *shape), drawn(2, shape[0]), drawn(3, shape[1])
    # Every size that float16 has: too large, normal, with fewer bits, too small.
    before *= (10.0 ** np.linspace(-9, 6, shape[1])).astype(np.float32)
    before[0, :4] = np.nan, np.inf, -np.inf, -0.0
    asked, found, again = drawn(4, 2, shape[0]), drawn(5, 2, shape[1]), drawn(6, 2, shape[1])
    exact, state = np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.float32)
    take_in(before, exact, key, wanted * 0, np.float32(0.75), asked, found, exact)
    stored = np.zeros(shape, dtype=stored_dtype)
    take_in(before, state, key, wanted * 0, np.float32(0.75), asked, found, stored)
    assert np.array_equal(state, torch.from_numpy(exact).to(dtype).float().numpy(), equal_nan=True)
    look_up(asked, state, again)
    assert np.array_equal(found, again, equal_nan=True)
    through_state(state, stored, again := np.empty(shape, dtype=np.float32))
    assert np.array_equal(again, state, equal_nan=True)


@pytest.mark.parametrize(("dtype", "stored_dtype"), STATE_DTYPES)
def test_every_number_of_16_bits_is_stored_and_read_as_torch_has_it(dtype, stored_dtype):
    bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(256, 256)
    expected, out = bits.view(dtype).float().numpy(), np.empty((256, 256), dtype=np.float32)
    through_state(expected, stored := np.empty((256, 256), dtype=stored_dtype), out)
    assert np.array_equal(out, expected, equal_nan=True)
    is_number = ~np.isnan(expected)
    assert np.array_equal(stored.view(np.int16)[is_number], bits.numpy()[is_number])


@pytest.mark.parametrize("dim", [64, 40, 16])
@pytest.mark.parametrize("visible", [1, 63, 64, 65, 130])
def test_attention_over_pages_is_that_of_torch(dim, visible):
    page_tokens, kv_heads, heads = 64, 2, 4
    keys, values = (as_bfloat16(drawn(seed, 5, kv_heads, page_tokens, dim)) for seed in (1, 2))
    table = np.array([[3, 1, 4]], dtype=np.int32)
    # What no row sees may be no number.
    last, used = table[0, (visible - 1) // page_tokens], (visible - 1) % page_tokens + 1
    keys[last, :, used:], values[last, :, used:] = 0x7FC0, 0x7FC0
    query = drawn(3, 1, heads, dim)
    brought = Projected(query, drawn(4, 1, heads * dim), drawn(5, 1, kv_heads, dim), drawn(6, 1, kv_heads, dim))
    slot = np.array([last * page_tokens + used - 1], dtype=np.int64)
    edges = np.array([0, 1], dtype=np.int32)
    found = attend(brought, keys, values, slot, table, np.array([visible], dtype=np.int32), edges, 0.3)
    seen = [
        torch.from_numpy(as_float32(part))[table[0].tolist()].transpose(0, 1).flatten(1, 2)[:, :visible].double()
        for part in (keys, values)
    ]
    spread = [part.repeat_interleave(heads // kv_heads, 0) for part in seen]
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(query).double().transpose(0, 1), *spread, scale=0.3
    )
    assert np.allclose(found, expected.transpose(0, 1).reshape(1, -1), rtol=1e-4, atol=1e-5)


def test_a_number_that_is_none_stays_in_its_row():
    x = np.ones((9, 40), dtype=np.float32)
    x[4, 3] = math.nan
    found = product(x, np.ones(40 * 70, dtype=np.float32))
    assert np.isnan(found[4]).all()
    assert (np.delete(found, 4, axis=0) == 40).all()


def test_rows_on_several_threads_are_the_rows_on_one(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    seen = []

    def doubled(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        seen.append(rows)
        return numbers[rows] * 2, numbers[rows]

    numbers = np.arange(200, dtype=np.float32).reshape(100, 2)
    twice, once = threads.by_rows(doubled, 100)
    assert np.array_equal(twice, 2 * numbers)
    assert np.array_equal(once, numbers)
    assert len(seen) == 3


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    jit.cache_directory.cache_clear()
    try:
        assert jit.cache_directory() is None
        assert as_machine_code(lambda x: x + 1)(2) == 3
    finally:
        jit.cache_directory.cache_clear()


def test_code_that_was_compiled_before_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = (
        "import numpy as np\nfrom onebox.model.compiled.arithmetic import product\n"
        "product(np.ones((1, 4), np.float32), np.ones(8, np.float32))\n"
        "print(sum(product.stats.cache_hits.values()), sum(product.stats.cache_misses.values()))"
    )
    answers = [
        subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert answers == [["0", "1"], ["1", "0"]]


def test_the_process_that_compiles_ahead_does_without_torch():
    asked = "import sys, onebox.model.compiled.ahead\nprint('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_nothing_is_compiled_where_there_is_no_numba():
    """Every room up to the engine can be imported, and no module asks for Numba on the way."""
    asked = (
        "import sys\nsys.modules['numba'] = sys.modules['llvmlite'] = None\n"
        "import onebox.engine.api, onebox.engine.runner, onebox.model.load\n"
        "print(onebox.model.compiled.is_available())"
    )
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


class BrokenCache:
    """A cache on a full disk whose files are damaged."""

    def load_overload(self, *_):
        raise EOFError("Ran out of input")

    def save_overload(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_cache_that_cannot_be_read_or_written_stops_nothing(caplog):
    def doubled(value):
        return 2 * value

    made = jit.compiled(doubled)
    made._cache = BrokenCache()
    jit._forgive(made._cache)
    assert made(21) == 42
    assert "compiled again" in caplog.text
    assert "cannot be cached: [Errno 28]" in caplog.text
