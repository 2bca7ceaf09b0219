"""What the head promises beyond agreeing with its twins: one set of logits, one order of ties, rows on their own."""

import pytest
import torch

from onebox.kernels.lm_head import reference
from onebox.kernels.lm_head.cases import exact_head, head
from onebox.spec.errors import MismatchError

ROW_COUNTS = (1, 2, 3, 8, 17, 64)


@pytest.fixture
def kernel():
    from onebox.kernels.lm_head import kernel

    return kernel


def on(device: torch.device, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def some_rows(inputs: dict[str, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
    return {**inputs, "planes": inputs["planes"][first:], "scale": inputs["scale"][first:]}


def check_rows_alone_and_together(kernel, inputs, k):
    token, logit = kernel.greedy_head(**inputs)
    ids, logits = kernel.top_k_head(**inputs, k=k)
    for count in ROW_COUNTS:
        first = len(token) - count
        few = some_rows(inputs, first)
        for found, expected in zip(kernel.greedy_head(**few), (token, logit), strict=True):
            assert torch.equal(found, expected[first:]), count
        for found, expected in zip(kernel.top_k_head(**few, k=k), (ids, logits), strict=True):
            assert torch.equal(found, expected[first:]), count


def check_the_three_agree(kernel, inputs, k):
    """The choices are those of the stored logits, bit for bit."""
    every, order = kernel.logits_head(**inputs).sort(dim=-1, descending=True, stable=True)
    ids, logits = kernel.top_k_head(**inputs, k=k)
    assert torch.equal(ids, order[:, :k])
    assert torch.equal(logits, every[:, :k])
    token, logit = kernel.greedy_head(**inputs)
    assert torch.equal(token, order[:, 0])
    assert torch.equal(logit, every[:, 0])


def test_a_rows_choice_depends_on_that_row_alone(kernel, device, poison):
    check_rows_alone_and_together(kernel, on(device, head(64, 37, 256)), 3)


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_greedy_top_k_and_logits_agree_to_the_bit(rows, kernel, device, poison):
    check_the_three_agree(kernel, on(device, head(rows, 150, 384)), 5)


@pytest.mark.gpu
def test_the_published_vocabulary(kernel, device, poison):
    """All 248,320 rows, drawn on the GPU as tiles: the choice, its ties and its independence of the other rows."""
    assert device.type == "cuda", "this machine has no GPU that torch can use"
    vocabulary, depth = 248320, 3072
    source = torch.Generator(device).manual_seed(5)
    few = on(device, head(64, 16, depth))
    tiles = (depth // 128, vocabulary // 16, 2048)
    weight = torch.randint(0, 256, tiles, generator=source, dtype=torch.uint8, device=device)
    weight_scale = torch.full((vocabulary,), 2.0**-12, dtype=torch.bfloat16, device=device)
    inputs = {**few, "weight": weight, "weight_scale": weight_scale}
    check_the_three_agree(kernel, inputs, 64)
    check_rows_alone_and_together(kernel, inputs, 20)


def test_many_passes_give_what_one_does(kernel, device, poison, monkeypatch):
    inputs = on(device, exact_head(3, 150, 128))
    expected = kernel.top_k_head(**inputs, k=3)
    greedy = kernel.greedy_head(**inputs)
    monkeypatch.setattr(kernel, "KEY_BLOCK", 8)
    for found, wanted in zip(kernel.top_k_head(**inputs, k=3), expected, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(kernel.greedy_head(**inputs), greedy, strict=True):
        assert torch.equal(found, wanted)


def test_equal_logits_go_to_the_lowest_id(kernel, device, poison):
    inputs = exact_head(2, 50, 128)
    inputs["planes"][:] = 0
    inputs["weight_scale"][::2] = -1.0  # half of the zeros are negative zeros
    for module, tensors in ((reference, inputs), (kernel, on(device, inputs))):
        ids, logits = module.top_k_head(**tensors, k=7)
        assert ids.tolist() == [list(range(7))] * 2
        assert not logits.any()
        assert module.greedy_head(**tensors)[0].tolist() == [0, 0]


def test_negative_logits_are_ordered_too(kernel, device, poison):
    inputs = head(1, 40, 128)
    inputs["weight_scale"] = -inputs["weight_scale"]
    expected = reference.top_k_head(**inputs, k=40)
    ids, logits = kernel.top_k_head(**on(device, inputs), k=40)
    assert torch.equal(ids.cpu(), expected[0])
    torch.testing.assert_close(logits.cpu(), expected[1], rtol=1e-4, atol=1e-4)
    assert float(logits.min()) < 0 < float(logits.max())


def test_padding_rows_are_never_chosen(kernel, device, poison):
    inputs = exact_head(1, 33, 128)
    inputs["planes"][:, 1] = 1
    inputs["weight"][:] = 0xFF  # every code is -1 ...
    inputs["weight"][:, 2] = 1  # ... but the last tile's, of which one row is a token
    assert kernel.greedy_head(**on(device, inputs))[0].tolist() == [32]
    assert kernel.top_k_head(**on(device, inputs), k=33)[0].tolist() == [[32, *range(32)]]


@pytest.mark.parametrize("k", [0, 21, 65])
def test_more_than_the_head_can_rank_is_refused(k, kernel, device):
    with pytest.raises(MismatchError, match="the best 1 to"):
        kernel.top_k_head(**on(device, head(1, 20, 128)), k=k)
