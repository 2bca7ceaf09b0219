import pytest

from onebox.spec.errors import UsageError
from onebox.spec.states import StateDtype


def test_a_dtype_has_the_name_that_vllm_gives_it_and_its_bytes():
    assert {dtype.value: StateDtype.parse(dtype).num_bytes for dtype in StateDtype} == {
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
    }
    assert StateDtype.parse("auto") is StateDtype.FLOAT32


@pytest.mark.parametrize("name", ["fp8", "bf16", "FLOAT16", ""])
def test_another_dtype_is_refused_by_flag(name):
    with pytest.raises(UsageError, match=r"--mamba-ssm-cache-dtype .* give auto, float32, bfloat16, float16\."):
        StateDtype.parse(name)
