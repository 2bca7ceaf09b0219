"""vLLM's own DFlash model on a CPU against our float32 reference, in the environment that `make vllm-test` makes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onebox.model.dflash_parts import load_reference_drafter
from onebox.model.dflash_reference import DraftContext, draft, extend
from onebox.pocket.ready import DRAFTER_DIRECTORY, MODEL_DIRECTORY
from onebox.spec.model import read_config
from tests.vllm.test_vllm import run_in_vllm

pytestmark = pytest.mark.vllm
CONTEXT_TOKENS, BLOCK_ROWS = 700, 16  # more than the window of 512, and a whole block


def test_vllms_block_drafter_computes_what_the_reference_does(tmp_path: Path):
    """The shipped drafter: both layer kinds. vLLM takes the masks that it was trained with, so nothing differs."""
    spec, weights = load_reference_drafter(DRAFTER_DIRECTORY, read_config(MODEL_DIRECTORY))
    torch.manual_seed(0)
    features = torch.randn(CONTEXT_TOKENS, len(spec.target_layer_ids) * spec.hidden_size)
    embedded = torch.randn(BLOCK_ROWS, spec.hidden_size) / 2
    save_file({"features": features, "embedded": embedded}, tmp_path / "inputs")
    paths = (MODEL_DIRECTORY, DRAFTER_DIRECTORY, tmp_path / "inputs", tmp_path / "outputs")
    run_in_vllm("block_drafter.py", *map(str, paths))
    theirs = load_file(tmp_path / "outputs")
    windows = [None if window < 0 else window for window in theirs["windows"].tolist()]
    layers = range(spec.num_hidden_layers)
    assert windows == [spec.window(layer) for layer in layers]
    assert theirs["causal"].tolist() == [spec.causal(layer) for layer in layers]
    context = DraftContext.empty(spec)
    extend(spec, weights, features, context)
    ours = {"keys": context.keys, "values": context.values, "hidden": draft(spec, weights, embedded, context)}
    for name, tensor in ours.items():
        # Cosines of a position in float32 there, in float64 here.
        torch.testing.assert_close(theirs[name], tensor, atol=1e-3, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")
