"""The checks of `onebox doctor` that compute: every kernel against its twin, and an answer of the pocket model."""

import time
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import onebox
from onebox.cli.doctor_machine import Finding, Health

if TYPE_CHECKING:
    import torch

    from onebox.kernels.common.case import Case
    from onebox.kernels.common.dispatch import Operation

__all__ = ["check_answer", "check_kernels", "trial_checks"]

_QUESTION = "Hi"


def trial_checks() -> list[Callable[[], Finding]]:
    return [check_kernels, check_answer]


def check_kernels() -> Finding:
    """One small case of every operation: on the GPU the Triton kernels, without one the forms for the CPU."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began, wrong, num_tried = time.perf_counter(), [], 0
    for operation, case in _small_cases():
        form = operation.kernel if device.type == "cuda" else operation.cpu
        if device.type == "cpu" and not operation.has_cpu_form:
            continue
        num_tried += 1
        problem = compare(case, operation.twin, form, device)
        if problem:
            wrong.append(f"{operation.name}: {problem}")
    taken = f"{num_tried} operations on the {'GPU' if device.type == 'cuda' else 'CPU'}, {_seconds(began)}"
    if not wrong:
        return Finding("kernels", Health.GOOD, f"equal to their twins: {taken}")
    advice = "Please report this with `onebox doctor --report FILE`; answers of this machine cannot be trusted."
    return Finding("kernels", Health.BAD, "\n".join([f"{len(wrong)} of {taken}, differ:", *wrong]), advice)


def compare(case: "Case", twin: Callable[..., Any], form: Callable[..., Any], device: "torch.device") -> str:
    """How a form's result differs from the twin's; "" if it does not."""
    import torch

    from onebox.kernels.common.tolerance import assert_same

    expected, found = (_call(each, case, place) for each, place in ((twin, torch.device("cpu")), (form, device)))
    try:
        assert_same(found, expected, operation=case.op)
    except AssertionError as error:
        return str(error)
    return ""


def _call(form: Callable[..., Any], case: "Case", device: "torch.device") -> tuple[Any, dict[str, Any]]:
    arguments = case.make(device)
    result = form(**arguments)
    return result, {name: arguments[name] for name in case.mutates}


def _small_cases() -> "list[tuple[Operation[..., Any], Case]]":
    """Each operation with its first small case."""
    import onebox.kernels

    found = []
    for item in iter_modules(onebox.kernels.__path__):
        if not item.ispkg or item.name == "common":
            continue
        package = import_module(f"onebox.kernels.{item.name}")
        cases = import_module(f"onebox.kernels.{item.name}.cases").CASES
        small = {case.op: case for case in reversed(cases) if not case.is_full}
        found += [(getattr(package, name), small[name]) for name in package.__all__]
    return found


def check_answer() -> Finding:
    """A question to the pocket model, through tokenizer, template and engine; asked twice, answered the same."""
    from onebox.pocket.ready import pocket_checkpoint
    from onebox.text.chat import ChatTemplate

    began = time.perf_counter()
    directory = pocket_checkpoint()
    prompt = ChatTemplate.load(directory, None).render([{"role": "user", "content": _QUESTION}])
    with onebox.LLM(directory, gpu_memory_utilization=0.5, kv_cache_memory_bytes=64 << 20, max_num_seqs=2) as llm:
        params = onebox.SamplingParams(temperature=0.0, max_tokens=64)
        first, second = (llm.generate([prompt], params)[0] for _ in range(2))
        device = llm.plan.device.type
    answer = " ".join(first.text.rpartition("</think>")[2].split())
    text = f"the pocket model on the {device}: {_QUESTION} -> {answer[:60]}; {_seconds(began)}"
    if first.token_ids and first.token_ids == second.token_ids:
        return Finding("answer", Health.GOOD, text)
    return Finding("answer", Health.BAD, f"{text}; asked again, the answer differs or is empty.", "Please report this.")


def _seconds(began: float) -> str:
    return f"{time.perf_counter() - began:.0f} s"
