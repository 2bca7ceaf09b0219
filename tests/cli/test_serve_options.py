"""Flags of `onebox serve` that vLLM knows: explained where they have no effect, refused where that would mislead."""

import pytest

from onebox.cli.serve_options import IgnoredOptions
from onebox.spec.errors import UsageError


def test_chunked_prefill_cannot_be_turned_off():
    with pytest.raises(UsageError) as caught:
        IgnoredOptions(enable_chunked_prefill=False).print_notices()
    message = str(caught.value)
    assert message.startswith("--no-enable-chunked-prefill is not supported: ")
    assert "always prefilled in chunks" in message
    assert "Remove the flag; --max-num-batched-tokens" in message


def test_asking_for_chunked_prefill_is_explained(capsys):
    IgnoredOptions(enable_chunked_prefill=True).print_notices()
    assert capsys.readouterr().out.startswith("--enable-chunked-prefill: ")


def test_nothing_is_said_where_no_such_flag_is_given(capsys):
    IgnoredOptions().print_notices()
    assert capsys.readouterr().out == ""


def test_more_than_one_gpu_is_refused():
    with pytest.raises(UsageError, match="--tensor-parallel-size is 2; onebox runs on one GPU"):
        IgnoredOptions(tensor_parallel_size=2).print_notices()
