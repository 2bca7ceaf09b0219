"""A prefix comes back from its chunks as it was, in every format, and nothing else in memory changes."""

import pytest
import torch

from onebox.engine.disk.layout import LEAST_PART_BYTES, PrefixLayout, staging_bytes, state_parts
from onebox.engine.disk.transfer import PrefixTransfer
from onebox.model.memory import Memory, MemoryShape
from onebox.planner.memory import MemoryRequest
from onebox.spec.kv import KVFormat
from onebox.spec.shapes import named_spec
from onebox.store.entry import plan_chunks
from onebox.store.keys import prefix_keys

NUM_PAGES, NUM_SLOTS, NUM_CHECKPOINTS = 60, 2, 4
PAGES = (*range(7, 20), 3, 2, 40, 41, 30, 29, 55)
"""Of a prefix: stretches and single ones, over two chunks."""
KV_FORMATS = ["bf16", "fp8", "turboquant", "turboquant_k3v2", "turboquant_k8v4"]


def memory_of(spec, kv, device, *, with_mtp=True, dtype=torch.float32):
    """Full of random bytes."""
    shape = MemoryShape(KVFormat.parse(kv), NUM_PAGES, NUM_SLOTS, NUM_CHECKPOINTS, 2, with_mtp)
    memory = Memory.allocate(spec, shape, dtype, device)
    generator = torch.Generator().manual_seed(len(kv))
    for tensor in parts_of(memory):
        noise = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8, generator=generator)
        tensor.view(torch.uint8).view(-1).copy_(noise)
    return memory


def parts_of(memory):
    return [*memory.page_tensors, memory.matrices, memory.conv_rows, memory.hidden]


def bits_of(memory):
    return [tensor.cpu().contiguous().view(torch.uint8).clone() for tensor in parts_of(memory)]


def move(transfer, chunks, source, target, first_page=0):
    """Every chunk of the prefix `source` (pages, checkpoint) into the place `target`, through a buffer."""
    buffer = transfer.new_buffer()
    for chunk in chunks:
        payload = transfer.save(chunk, *source, buffer, transfer.fence())
        assert len(payload) == chunk.num_bytes
        transfer.restore(chunk, *target, buffer, transfer.fence(), first_page)
    buffer.close()


@pytest.fixture(scope="module")
def spec(checkpoint):
    from onebox.spec.model import read_config

    return read_config(checkpoint)


def check_round_trip(spec, kv, device, *, with_mtp=True, dtype=torch.float32):
    memory = memory_of(spec, kv, device, with_mtp=with_mtp, dtype=dtype)
    layout = PrefixLayout(memory, NUM_SLOTS)
    transfer = PrefixTransfer(layout, device)
    chunks = plan_chunks(prefix_keys(range(64 * len(PAGES))), layout.chunks)
    before = bits_of(memory)
    free = [page for page in range(1, NUM_PAGES) if page not in PAGES]
    targets = tuple(free[place * 2 % len(free)] for place in range(len(PAGES)))
    first_page = 3
    move(transfer, chunks, (PAGES, 1), (targets, 3), first_page)
    after = bits_of(memory)
    num_pools = len(memory.page_tensors)
    for old, new in zip(before[:num_pools], after[:num_pools], strict=True):
        expected = old.clone()
        expected[list(targets[first_page:])] = old[list(PAGES[first_page:])]
        assert torch.equal(new, expected)
    for old, new, axis in zip(before[num_pools:], after[num_pools:], (1, 1, 0), strict=True):
        expected = old.clone()
        expected.select(axis, NUM_SLOTS + 3).copy_(old.select(axis, NUM_SLOTS + 1))
        assert torch.equal(new, expected)


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_a_prefix_comes_back_as_it_was_and_nothing_else_changes(spec, kv):
    check_round_trip(spec, kv, torch.device("cpu"), with_mtp=kv != "fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("kv", KV_FORMATS)
def test_a_prefix_comes_back_as_it_was_on_a_gpu_and_nothing_is_allocated_there(spec, kv):
    device = torch.device("cuda")
    check_round_trip(spec, kv, device, dtype=torch.bfloat16)
    memory = memory_of(spec, kv, device, dtype=torch.bfloat16)
    layout = PrefixLayout(memory, NUM_SLOTS)
    transfer = PrefixTransfer(layout, device)
    chunks = plan_chunks(prefix_keys(range(64 * len(PAGES))), layout.chunks)
    torch.cuda.synchronize()
    num_allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    move(transfer, chunks, (PAGES, 1), (tuple(range(1, 1 + len(PAGES))), 3))
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == num_allocations


@pytest.mark.gpu
def test_chunks_are_the_same_bytes_on_a_cpu_and_on_a_gpu(spec):
    """And a copy comes after what was queued before its fence."""
    payloads = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        memory = memory_of(spec, "fp8", device, dtype=torch.bfloat16)
        layout = PrefixLayout(memory, NUM_SLOTS)
        transfer = PrefixTransfer(layout, device)
        chunks = plan_chunks(prefix_keys(range(64 * len(PAGES))), layout.chunks)
        if name == "cuda":
            torch.cuda._sleep(200_000_000)
        memory.hidden[NUM_SLOTS + 1] = 7.0
        fence, buffer = transfer.fence(), transfer.new_buffer()
        payloads.append([bytes(transfer.save(chunk, PAGES, 1, buffer, fence)) for chunk in chunks])
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize(("state", "page"), [(1, 1), (10 << 20, 1 << 10), (153_000_001, 1_638_400), (1 << 20, 1 << 20)])
def test_the_parts_of_a_state_are_all_of_it_and_none_is_larger_than_a_chunk(state, page):
    parts = state_parts(state, page)
    assert sum(parts) == state
    assert min(parts) > 0
    assert max(parts) <= max(16 * page, LEAST_PART_BYTES)


@pytest.mark.parametrize("kv", ["bf16", "turboquant"])
def test_the_planned_staging_is_what_is_allocated(spec, kv):
    memory = memory_of(spec, kv, torch.device("cpu"))
    transfer = PrefixTransfer(PrefixLayout(memory, NUM_SLOTS), torch.device("cpu"))
    request = MemoryRequest(1000, NUM_SLOTS, KVFormat.parse(kv), drafts=1, activation_bytes=4)
    assert staging_bytes(spec, request, "cpu") == 5 * len(transfer.new_buffer().bytes)


def test_staging_for_the_122b_is_a_small_part_of_a_box():
    spec = named_spec("qwen3.5-122b-a10b")
    request = MemoryRequest(131_072, 8, KVFormat.parse("bf16"), drafts=4)
    assert staging_bytes(spec, request, "cuda") < 256 << 20
