"""The steps from a bare box to a checkpoint that is ready to serve, each with what is left of it and how it is done.

What is done is read from the files (`place.py`), so a step that was killed, or undone by hand, is simply to do again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from onebox.checkpoint.build import can_resume, run_build
from onebox.checkpoint.disk import require_disk
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.verify import verify_checkpoint
from onebox.engine.api import EngineOptions, EnginePlan, TokenInfo, compile_ahead, kernels_are_compiled, plan_engine
from onebox.setup.machine import Machine, describe_memory, find_machine
from onebox.setup.place import SetupPlace, file_stamps
from onebox.setup.sources import ReportProgress, Sources, locate_sources, size_text
from onebox.spec.errors import MismatchError
from onebox.spec.modules import ModuleClass

__all__ = ["Outlook", "Setup", "SetupStep"]

_MARGIN_BYTES = 320 << 20
"""Beyond the bytes that are fetched and written: what a file system needs, journals, kernels."""
_BUILD_BYTES_PER_S = 1.0e9
"""For an estimate: what a build wrote and a verification read on two cores."""
_FETCH_BYTES_PER_S = 100e6
"""For an estimate: a gigabit connection."""


class SetupStep(StrEnum):
    """In their order."""

    CHECK = "check"
    FETCH = "fetch"
    BUILD = "build"
    VERIFY = "verify"
    WARM = "warm"
    SERVE = "serve"


@dataclass(frozen=True)
class Outlook:
    """What is left of a step."""

    is_done: bool
    text: str


class Setup:
    """One recipe in one directory: what is left of each step, and its doing.

    `progress` shows how far a step is; `say` takes a line that cannot wait for the step's end. Without `will_serve`,
    memory that other programs use now is no hindrance.
    """

    def __init__(
        self,
        place: SetupPlace,
        options: EngineOptions,
        progress: ReportProgress,
        say: Callable[[str], None],
        *,
        will_serve: bool = True,
    ) -> None:
        self.place = place
        self.options = options
        self._progress = progress
        self._say = say
        self._will_serve = will_serve

    def tidy(self) -> None:
        """Removes what a run that was stopped at the wrong moment has left of an earlier build."""
        if self.place.is_built:
            self.place.end_build()

    def outlook(self, step: SetupStep) -> Outlook:
        """What is left of a step, in one line; writes nothing. Steps before it may still be to do."""
        outlooks = {
            SetupStep.CHECK: self._check_outlook,
            SetupStep.FETCH: self._fetch_outlook,
            SetupStep.BUILD: self._build_outlook,
            SetupStep.VERIFY: self._verify_outlook,
            SetupStep.WARM: self._warm_outlook,
        }
        return outlooks[step]()

    def run(self, step: SetupStep) -> str:
        """Does a step, all before it being done; returns what was done, in one line. A killed run is resumed."""
        work = {
            SetupStep.CHECK: self._check,
            SetupStep.FETCH: self._fetch,
            SetupStep.BUILD: self._build,
            SetupStep.VERIFY: self._verify,
            SetupStep.WARM: self._warm,
        }
        return work[step]()

    # Check: the machine, the memory and the disk for what is about to come.

    @cached_property
    def _machine(self) -> Machine:
        return find_machine(self.options, is_shared=self._will_serve)

    @cached_property
    def _sources(self) -> Sources:
        return locate_sources(self.place)

    @cached_property
    def _future(self) -> tuple[dict[str, Any], dict[ModuleClass, int]]:
        """The config and the bytes per class of the checkpoint that is yet to come."""
        return self._sources.output()

    @property
    def checkpoint(self) -> Path:
        """The directory that will be served."""
        return self._sources.base_directory if self.place.recipe.formats is None else self.place.output

    @property
    def _is_ready(self) -> bool:
        """Whether the checkpoint to serve lies here."""
        return self._sources.is_complete if self.place.recipe.formats is None else self.place.is_built

    def _check_outlook(self) -> Outlook:
        return Outlook(False, "this machine, its memory and its disk")

    def _check(self) -> str:
        self.place.check_output()
        lines = [str(self._machine)]
        if self._is_ready:
            memory = self._machine.plan_checkpoint(self.checkpoint, self.options)
        else:
            config, class_bytes = self._future
            memory = self._machine.plan_future(config, class_bytes, self.options)
            needed = self._sources.missing_bytes + self._left_to_write() + _MARGIN_BYTES
            require_disk("What is to be fetched and built", self.place.directory, needed, "--dir")
            lines.append(f"{size_text(needed)} of disk are needed, and free")
        return "\n".join([*lines, describe_memory(memory)])

    def _left_to_write(self) -> int:
        if self.place.recipe.formats is None:
            return 0
        return max(0, sum(self._future[1].values()) - self.place.partial_bytes)

    # Fetch.

    def _fetch_outlook(self) -> Outlook:
        if self._is_ready:
            return Outlook(True, "nothing is needed")
        if self._sources.is_complete:
            return Outlook(True, "all sources are here")
        missing = self._sources.missing_bytes
        what = ", ".join(self._sources.describe_missing()) or "only to be named"
        return Outlook(False, f"{what}; {_duration(missing / _FETCH_BYTES_PER_S)} at 100 MB/s")

    def _fetch(self) -> str:
        missing = self._sources.missing_bytes
        require_disk("What is to be fetched", self.place.directory, missing + _MARGIN_BYTES, "--dir")
        began = time.perf_counter()
        self._sources.fetch(self._progress, self._say)
        del self._sources  # located again: what was to be fetched lies here now
        seconds = time.perf_counter() - began
        return f"{size_text(missing)} ({missing / 1e6 / max(seconds, 1e-3):.0f} MB/s)"

    # Build.

    def _build_outlook(self) -> Outlook:
        if self.place.recipe.formats is None:
            return Outlook(True, f"nothing to build: {self.checkpoint} is served as it is")
        if self.place.is_built:
            return Outlook(True, f"{self.place.output}")
        size, left = sum(self._future[1].values()), self._left_to_write()
        return Outlook(
            False,
            f"{self.place.output}: {size_text(size)}, {size_text(left)} of them to write; "
            f"{_duration(left / _BUILD_BYTES_PER_S)} at 1 GB/s",
        )

    def _build(self) -> str:
        plan = self._sources.build_plan()
        require_disk("The build", self.place.directory, self._left_to_write() + _MARGIN_BYTES, "--dir")
        is_same = self.place.begin_build()
        restart = not (is_same and can_resume(plan, self.place.output))
        with self._progress("building", plan.nbytes) as on_bytes:
            manifest = run_build(plan, self.place.output, restart=restart, on_bytes=on_bytes)
        self.place.end_build()
        return f"{self.place.output}: {len(manifest.tensors):,} tensors, {size_text(plan.nbytes)}"

    # Verify.

    def _verify_outlook(self) -> Outlook:
        if self._is_ready and self.place.is_verified(self.checkpoint):
            return Outlook(True, f"{self.checkpoint} is unchanged since")
        size = sum(self._future[1].values()) if not self._is_ready else self._output_bytes()
        return Outlook(False, f"{size_text(size)} to read; {_duration(size / _BUILD_BYTES_PER_S)} at 1 GB/s")

    def _output_bytes(self) -> int:
        return sum(size for size, _ in file_stamps(self.checkpoint).values())

    def _verify(self) -> str:
        output = self.checkpoint
        with self._progress("verifying", self._output_bytes()) as on_bytes:
            if self.place.recipe.formats is None:
                report = inspect_checkpoint(output, deep=True, on_bytes=on_bytes)
                problems = [problem for problem in report.problems if problem.is_fatal]
                advice = f"remove {output} and run the same command again, or choose another source."
            else:
                problems = verify_checkpoint(output, on_bytes)
                advice = f"remove {output} and run the same command again to build it anew."
        if problems:
            raise MismatchError(f"{output} is not sound: {problems[0].message} ({len(problems):,} in all); {advice}")
        self.place.mark_verified(output)
        return f"{output}: {size_text(self._output_bytes())}, every tensor is as it should be"

    # Warm.

    def _plan(self) -> EnginePlan:
        return plan_engine(self.checkpoint, self.options, TokenInfo(), self._machine.box)

    def _warm_outlook(self) -> Outlook:
        if not self._machine.uses_gpu:
            return Outlook(True, "there is nothing to compile for a CPU")
        if self._is_ready and kernels_are_compiled(self._plan()):
            return Outlook(True, "all kernels are in Triton's cache")
        return Outlook(False, "about 100 kernels to compile; a minute or two")

    def _warm(self) -> str:
        count = compile_ahead(self._plan(), lambda done: self._say(f"{done} kernels compiled"))
        return f"{count} kernels compiled"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
