"""Small engines and schedulers on the fake runner, and what tests ask of them."""

import random

from onebox.engine.config import EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.request import Request, SamplingParams
from tests.engine.fake import VOCAB_SIZE, Stand, plain_answer


def config(**limits):
    """Two slots and two places in the queue, unless `limits` say otherwise."""
    sizes = {"max_model_len": 500, "num_pages": 30, "num_checkpoints": 4, "max_num_seqs": 2, "max_num_waiting": 2}
    return EngineConfig(**(sizes | limits))


def request(name, prompt, **sampling):
    return Request(name, tuple(prompt), SamplingParams(**({"max_tokens": 5} | sampling)))


def answer(prompt, max_tokens=5):
    """What the fake runner answers."""
    return plain_answer(tuple(prompt), max_tokens).token_ids


def stand(method="none", max_drafts=0, acceptance=(), draft_accuracy=0.7, **limits):
    """A scheduler and its runner, stepped by hand."""
    sizes = {"max_model_len": 1000, "num_pages": 60, "num_checkpoints": 8, "max_num_batched_tokens": 256} | limits
    speculation = SpeculationConfig(SpeculationMethod(method), max_drafts, synthetic_acceptance=acceptance)
    return Stand(EngineConfig(**sizes, speculation=speculation), draft_accuracy)


def prompt(length, seed=0):
    numbers = random.Random(seed)
    return tuple(numbers.randrange(VOCAB_SIZE - 1) for _ in range(length))


def running(it):
    """The ids of a stand's running requests."""
    return set(it.scheduler._running)
