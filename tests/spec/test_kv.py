"""KV formats: names, refusals, exact bytes."""

import subprocess
import sys
from pathlib import Path

import pytest

import onebox
from onebox.spec.errors import UsageError
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec

SPEC = named_spec("qwen3.5-122b-a10b")
# Looked for as a file: importing it would load torch.
CODECS = Path(onebox.__file__).parent / "formats" / "kv.py"
PACKED_NAMES = [f"turboquant_k{key}v{value}" for key in (8, 4, 3, 2) for value in (8, 4, 3, 2)]


@pytest.mark.parametrize(
    ("name", "key_bytes", "value_bytes"),
    [
        ("bf16", 512, 512),
        ("fp8", 258, 258),
        ("turboquant", 130, 130),
        ("turboquant_k8v4", 258, 130),
        ("turboquant_k4v3", 130, 98),
        ("turboquant_k3v2", 98, 66),
    ],
)
def test_a_vector_of_256_takes_these_bytes(name, key_bytes, value_bytes):
    kv = KVFormat.parse(name)
    assert kv.key_bytes_per_vector(256) == key_bytes
    assert kv.value_bytes_per_vector(256) == value_bytes
    assert kv.bytes_per_token_layer(SPEC) == 2 * (key_bytes + value_bytes)


def test_bf16_is_the_published_size_of_a_token():
    assert KVFormat.parse("bf16").bytes_per_token(SPEC, with_mtp=False) == 24576
    assert KVFormat.parse("bf16").bytes_per_token(SPEC, with_mtp=True) == 13 * 2048


def test_turboquant_is_its_four_bit_form():
    short, full = KVFormat.parse("turboquant"), KVFormat.parse("turboquant_k4v4")
    assert short == full
    assert (short.key_bits, short.value_bits) == (4, 4)


@pytest.mark.parametrize("name", ["", "BF16", "fp16", "turboquant_k5v4", "turboquant_k4", "turboquant_k16v4", "int4"])
def test_an_unknown_name_is_refused_by_flag(name):
    with pytest.raises(UsageError, match=r"--kv-cache-dtype .* is not known"):
        KVFormat.parse(name)


def test_a_width_that_does_not_fill_bytes_is_rounded_up():
    assert KVFormat.parse("turboquant_k3v3").key_bytes_per_vector(12) == 5 + 2


@pytest.mark.skipif(not CODECS.exists(), reason="onebox.formats.kv is not there")
def test_the_codecs_take_the_same_bytes():
    """In a process of its own: the codecs need torch, and these tests must not load it."""
    names = ["bf16", "fp8", "turboquant", *PACKED_NAMES]
    script = (
        "from onebox.formats.kv import kv_codecs\n"
        f"for name in {names!r}:\n"
        "    codecs = kv_codecs(name)\n"
        "    print(name, codecs.key.bytes_per_vector(256), codecs.value.bytes_per_vector(256))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    ours = [KVFormat.parse(name) for name in names]
    expected = [f"{kv.name} {kv.key_bytes_per_vector(256)} {kv.value_bytes_per_vector(256)}" for kv in ours]
    assert out.split("\n")[:-1] == expected
