"""What paged attention promises beyond its twin's numbers: a row's bits come from its query and what it sees alone."""

import pytest
import torch

from onebox.formats.kv_pages import KVPages
from onebox.kernels.attention import reference
from onebox.kernels.attention.cases import make_inputs
from onebox.spec.kv import PAGE_TOKENS
from tests.kernels.tolerance import assert_same

NAMES = ["bf16", "fp8", "turboquant_k4v4", "turboquant_k8v4"]
EACH_FORMAT = pytest.mark.parametrize("name", NAMES)
TINY, FULL = (4, 2, 32), (32, 2, 256)


def decode(**arguments):
    from onebox.kernels.attention.decode import paged_attention

    return paged_attention(**arguments)


def prefill(**arguments):
    from onebox.kernels.attention.prefill import paged_attention_prefill

    return paged_attention_prefill(**arguments)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def alone(arguments, sequence, row):
    """Arguments for one row of a sequence as a step of its own: the context that it sees, the pages that it needs."""
    device = arguments["query"].device
    bounds = arguments["cu_rows"].tolist()
    behind = bounds[sequence + 1] - 1 - (bounds[sequence] + row)
    visible = int(arguments["context"][sequence]) - behind
    table = arguments["page_table"][sequence : sequence + 1, : -(-visible // PAGE_TOKENS)].contiguous()
    query = arguments["query"][bounds[sequence] + row][None]
    own = {"query": query, "page_table": table, "context": int32([visible], device), "cu_rows": int32([0, 1], device)}
    return {**arguments, **own}


def assert_every_row_is_as_alone(arguments):
    together = decode(**arguments)
    bounds = arguments["cu_rows"].tolist()
    for sequence in range(len(bounds) - 1):
        for row in range(bounds[sequence + 1] - bounds[sequence]):
            assert torch.equal(decode(**alone(arguments, sequence, row))[0], together[bounds[sequence] + row])


@EACH_FORMAT
def test_a_draft_row_has_the_bits_of_the_same_row_alone(name, device, poison):
    """Two rows share a tile of queries; the first of them does not see the last tile of tokens at all."""
    assert_every_row_is_as_alone(make_inputs(device, name, (16, 1, 32), lengths=[66], rows=[3]))


def assert_gated_rows_are_those_of_two_operations(device, name, heads, lengths, rows):
    from onebox.kernels.attention.decode import paged_attention_fused
    from onebox.kernels.attention.gate import attention_gate_fused

    arguments = make_inputs(device, name, heads, lengths, rows)
    draw = torch.Generator().manual_seed(3)
    qkv_parts = torch.randn(3, sum(rows), 2 * (heads[0] + heads[1]) * heads[2], generator=draw).to(device)
    found = paged_attention_fused(**arguments, qkv_parts=qkv_parts)
    for part, expected in zip(found[:3], attention_gate_fused(decode(**arguments), qkv_parts)[:3], strict=True):
        assert torch.equal(part, expected)


@EACH_FORMAT
def test_gated_rows_are_those_of_attention_and_gate_one_after_the_other(name, device, poison):
    assert_gated_rows_are_those_of_two_operations(device, name, (4, 2, 128), [131, 70], [3, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_gated_rows_are_those_of_attention_and_gate_at_full_size(name, device, poison):
    assert_gated_rows_are_those_of_two_operations(device, name, FULL, [8000, 700, 40], [1, 3, 2])


def test_a_row_does_not_see_the_other_sequences(device, poison):
    assert_every_row_is_as_alone(make_inputs(device, "turboquant_k8v4", TINY, lengths=[130, 3, 65], rows=[2, 1, 3]))


def on_host(arguments):
    """The same call for the twin, which runs on a CPU."""
    return {name: part.to(torch.device("cpu")) if hasattr(part, "to") else part for name, part in arguments.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "turboquant_k4v4"])
def test_rows_at_the_end_of_a_million_tokens_are_the_twins(name, device, poison):
    """1,010,000 tokens, as far as YaRN stretches the published models: 1,123 or 2,053 pieces, the last step's rows."""
    arguments = make_inputs(device, name, (16, 1, 128), lengths=[1_010_000], rows=[3])
    expected = reference.paged_attention(**on_host(arguments))
    assert_same(decode(**arguments).cpu(), expected, "decode", "paged_attention")
    del arguments["context"]
    arguments["start"] = int32([1_010_000 - 3], device)
    expected = reference.paged_attention_prefill(**on_host(arguments))
    assert_same(prefill(**arguments).cpu(), expected, "prefill", "paged_attention_prefill")


@pytest.mark.gpu
@EACH_FORMAT
@pytest.mark.parametrize(("heads", "length"), [(FULL, 1300), (FULL, 8194), (FULL, 25090), ((16, 2, 256), 1026)])
def test_a_draft_row_has_the_bits_of_the_same_row_alone_at_full_size(name, heads, length, device, poison):
    assert_every_row_is_as_alone(make_inputs(device, name, heads, lengths=[length, 129], rows=[3, 9]))


@pytest.mark.gpu
@EACH_FORMAT
@pytest.mark.parametrize("count", [2, 3, 8, 17, 64])
def test_a_row_does_not_see_the_other_sequences_at_full_size(name, count, device, poison):
    lengths = [300 + 7 * index for index in range(count)]
    assert_every_row_is_as_alone(make_inputs(device, name, FULL, lengths=lengths, rows=[1] * count))


def renumbered(arguments):
    """The same tokens in other pages, among strangers that hold NaN."""
    pages, table = arguments["pages"], arguments["page_table"]
    count = pages.key_codes.shape[0]
    moved = torch.arange(count - 1, -1, -1, device=table.device) * 2 + 1

    def move(part):
        if not isinstance(part, torch.Tensor):
            return part
        wider = part.new_zeros((2 * count, *part.shape[1:]))
        wider.view(torch.uint8).fill_(0xFF)
        wider[moved] = part
        return wider

    return {**arguments, "pages": KVPages(*map(move, pages)), "page_table": moved[table.long()].to(torch.int32)}


@pytest.mark.parametrize("name", ["fp8", "turboquant_k4v4"])
def test_page_numbers_do_not_matter(name, device, poison):
    arguments = make_inputs(device, name, TINY, lengths=[70, 65], rows=[1, 2])
    assert torch.equal(decode(**renumbered(arguments)), decode(**arguments))


@pytest.mark.parametrize("name", ["bf16", "turboquant_k8v4"])
def test_what_lies_behind_the_context_is_not_read(name, device, poison):
    arguments = make_inputs(device, name, TINY, lengths=[70], rows=[2])
    expected = decode(**arguments)
    last_page = int(arguments["page_table"][0, 1])
    for part in arguments["pages"][1:]:
        if part is not None:
            part[last_page, :, 6:].view(torch.uint8).fill_(0xFF)
    assert torch.equal(decode(**arguments), expected)


def test_rows_of_no_sequence_are_zeros_and_disturb_nobody(device, poison):
    """A graph is captured for more rows and sequences than a step may have."""
    arguments = make_inputs(device, "bf16", TINY, lengths=[70, 0], rows=[2, 0])
    expected = decode(**arguments)
    padded = {**arguments, "query": torch.cat([arguments["query"], arguments["query"]])}
    found = decode(**padded)
    assert torch.equal(found[:2], expected)
    assert (found[2:] == 0).all()


def assert_splits_do_not_matter(name, heads, splits, device):
    arguments = make_inputs(device, name, heads, lengths=[200], rows=[200])
    del arguments["context"]
    query = arguments.pop("query")
    whole = prefill(**arguments, query=query, start=int32([0], device))
    for split in splits:
        parts = []
        for start, end in ((0, split), (split, 200)):
            bounds = {"start": int32([start], device), "cu_rows": int32([0, end - start], device)}
            parts.append(prefill(**{**arguments, **bounds}, query=query[start:end]))
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("name", "splits"), [("bf16", (64, 128, 77)), ("turboquant_k8v4", (64,))])
def test_a_prompt_split_anywhere_gives_the_same_bits(name, splits, device, poison):
    assert_splits_do_not_matter(name, (1, 1, 32), splits, device)


def by_slices(monkeypatch, name, heads, lengths, rows, device):
    """Outputs over packed pages: read as they are, decoded before in slices of 128 tokens, and in one slice."""
    from onebox.kernels.attention import prefill as module

    arguments = make_inputs(device, name, heads, lengths=lengths, rows=rows)
    del arguments["context"]
    starts = int32([length - count for length, count in zip(lengths, rows, strict=True)], device)
    outputs = [prefill(**arguments, start=starts)]
    monkeypatch.setattr(module, "DIRECT_TOKENS", 0)
    for tokens in (128, 2048):
        monkeypatch.setattr(module, "slice_tokens", lambda _, tokens=tokens: tokens)
        outputs.append(prefill(**arguments, start=starts))
    return outputs


@pytest.mark.parametrize("name", ["fp8", "turboquant_k4v4"])
def test_pages_decoded_in_any_slices_give_the_same_bits(name, device, poison, monkeypatch):
    """The second sequence ends in the first slice. The interpreter sums several planes and one in different orders."""
    direct, sliced, whole = by_slices(monkeypatch, name, (1, 1, 64), [150, 40], [20, 10], device)
    assert torch.equal(sliced, whole)
    assert_same(sliced, direct, "decoded before", "paged_attention_prefill")


@pytest.mark.gpu
@EACH_FORMAT
def test_pages_decoded_before_give_the_same_bits_at_full_size(name, device, poison, monkeypatch):
    direct, sliced, whole = by_slices(monkeypatch, name, FULL, [1500, 90, 700], [300, 30, 700], device)
    assert torch.equal(direct, sliced)
    assert torch.equal(sliced, whole)


@pytest.mark.gpu
@EACH_FORMAT
def test_a_prompt_split_anywhere_gives_the_same_bits_at_full_size(name, device, poison):
    assert_splits_do_not_matter(name, FULL, (64, 128, 77), device)


def test_prefilled_sequences_do_not_see_each_other(device, poison):
    arguments = make_inputs(device, "fp8", (2, 1, 32), lengths=[70, 30], rows=[6, 30])
    del arguments["context"]
    together = prefill(**arguments, start=int32([64, 0], device))
    own = {"query": arguments["query"][6:], "page_table": arguments["page_table"][1:].contiguous()}
    bounds = {"start": int32([0], device), "cu_rows": int32([0, 30], device)}
    assert torch.equal(prefill(**{**arguments, **own, **bounds}), together[6:])
