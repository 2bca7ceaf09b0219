"""The sources of a recipe: which lie here, what is to be fetched of the others, and the build that they give.

A source is used from its directory, from the Hugging Face cache, or from what an earlier run fetched. Otherwise it is
fetched: the tensors that the build takes, and no more.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onebox.checkpoint.bind import bind
from onebox.checkpoint.build import BuildPlan, output_bytes, plan_build
from onebox.checkpoint.fetch import FetchPlan, foresee_checkpoint, plan_tensors, plan_whole, run_fetch
from onebox.checkpoint.hub import HubId, find_local
from onebox.checkpoint.inspect import report_on
from onebox.checkpoint.origin import Origin, read_origin
from onebox.checkpoint.recipe import BuildSource, BuildSources, Recipe, classes_used, open_source
from onebox.checkpoint.source import join_checkpoints, open_checkpoint
from onebox.setup.place import SetupPlace
from onebox.setup.recipe_file import RecipeSource
from onebox.spec.modules import ModuleClass

__all__ = ["ReportProgress", "Sources", "locate_sources", "size_text"]

ReportProgress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Called with what is done and its bytes; its context gives the function to be called with the bytes that are done."""
_MANY_CLASSES = 4
"""So many classes of modules are not listed one by one."""
Uses = frozenset[ModuleClass] | None
"""The module classes that are taken from a source; None: all."""


@dataclass(frozen=True)
class _Located:
    """One source: the directory where it lies, or how it gets to one or more of them."""

    source: RecipeSource
    uses: Uses
    directory: Path
    fetches: tuple[FetchPlan, ...] = ()
    """Each with its directory, the first being `directory`; empty if the source lies there."""

    @property
    def missing_bytes(self) -> int:
        return sum(fetch.missing_bytes for fetch in self.fetches)

    def opened(self) -> BuildSource:
        others = [fetch.directory for fetch in self.fetches[1:]]
        return open_source(self.source.role, self.directory, self.uses, others)

    def foreseen(self) -> BuildSource:
        """As `opened`, before it is fetched: from the headers alone."""
        if all(fetch.is_complete for fetch in self.fetches):
            return self.opened()
        first, *others = (
            open_checkpoint(fetch.directory) if fetch.is_complete else foresee_checkpoint(fetch)
            for fetch in self.fetches
        )
        checkpoint = join_checkpoints(first, others)
        return BuildSource(self.source.role, checkpoint, bind(checkpoint))


@dataclass(frozen=True)
class Sources:
    """All sources of a recipe. `formats` are None if the base is served as it is."""

    located: tuple[_Located, ...]
    formats: Recipe | None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to fetch."""
        return all(plan.is_complete for one in self.located for plan in one.fetches)

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be fetched; it may be that only the end of a fetch is missing."""
        return sum(one.missing_bytes for one in self.located)

    @property
    def base_directory(self) -> Path:
        return self.located[0].directory

    def describe_missing(self) -> list[str]:
        """Each source of which something is missing, with sizes."""
        return [
            f"{size_text(one.missing_bytes)} of {one.source}"
            + (f" ({', '.join(sorted(one.uses))})" if one.uses and len(one.uses) < _MANY_CLASSES else "")
            for one in self.located
            if one.missing_bytes
        ]

    def output(self) -> tuple[dict[str, Any], dict[ModuleClass, int]]:
        """The config and the bytes per class of what will be served, from headers alone."""
        opened = [one.foreseen() for one in self.located]
        base = opened[0]
        if self.formats is None:
            return base.checkpoint.config, report_on(base.checkpoint, base.binding, is_deep=False).class_bytes
        return output_bytes(self.formats, _build_sources(opened))

    def fetch(self, progress: ReportProgress, say: Callable[[str], None]) -> None:
        """Fetches what is missing, one source after the other."""
        for one in self.located:
            for plan in one.fetches:
                if not plan.is_complete:
                    with progress(f"fetching {one.source}", plan.nbytes) as on_bytes:
                        run_fetch(plan, on_bytes, say)

    def build_plan(self) -> BuildPlan:
        """The build of these sources, which all lie here."""
        if self.formats is None:
            raise ValueError("nothing is built of a recipe without formats")
        return plan_build(self.formats, _build_sources([one.opened() for one in self.located]))


def _build_sources(opened: list[BuildSource]) -> BuildSources:
    by_role = {source.role: source for source in opened}
    return BuildSources(by_role["base"], by_role.get("fp8"), by_role.get("mtp"))


def locate_sources(place: SetupPlace) -> Sources:
    """Finds every source of the recipe; asks the hub only for those of which nothing is known here."""
    recipe = place.recipe
    roles = {source.role for source in recipe.sources}
    located = []
    for source in recipe.sources:
        uses = None
        if recipe.formats:
            uses = classes_used(recipe.formats, source.role, has_fp8="fp8" in roles, has_mtp_source="mtp" in roles)
        located.append(_locate(place, source, uses))
    return Sources(tuple(located), recipe.formats)


def _locate(place: SetupPlace, source: RecipeSource, uses: Uses) -> _Located:
    if source.hub_id is None:
        return _Located(source, uses, source.directory or Path())
    fetches = _fetches(place, source.hub_id, uses)
    if not fetches:
        cached = find_local(source.hub_id, uses)
        if cached:
            return _Located(source, uses, cached)
        fetches = [_new_fetch(source.hub_id, uses, place.source_directory(source.hub_id))]
    return _Located(source, uses, fetches[0].directory, tuple(fetches))


def _new_fetch(hub_id: HubId, uses: Uses, directory: Path) -> FetchPlan:
    return plan_whole(hub_id, directory) if uses is None else plan_tensors(hub_id, uses, directory)


def _fetches(place: SetupPlace, hub_id: HubId, uses: Uses) -> list[FetchPlan]:
    """What earlier runs have fetched of a repository, or begun to, and what `uses` needs in addition.

    The addition goes to a directory of its own and is of the same commit. Empty if nothing was fetched before.
    """
    found = []
    for directory in place.source_directories(hub_id):
        origin = read_origin(directory)
        if origin is None:
            break
        # Files that were removed since are fetched again.
        plan = FetchPlan(replace(origin, is_complete=origin.is_complete and _is_there(origin, directory)), directory)
        if not origin.only:
            return [plan]
        found.append(plan)
    if not found:
        return []
    if uses is None:
        return [plan_whole(hub_id, directory)]
    first, *others = found
    held = {name for plan in found for name in plan.origin.only}
    others = [plan for plan in others if uses & {ModuleClass(name) for name in plan.origin.only}]
    missing = frozenset(kind for kind in uses if kind.value not in held)
    if missing:
        same = HubId(hub_id.repo, first.origin.commit)
        others.append(plan_tensors(same, missing, directory))
    return [first, *others]


def _is_there(origin: Origin, directory: Path) -> bool:
    return all((directory / file.name).is_file() for file in origin.files)


def size_text(nbytes: int) -> str:
    """Bytes for people: 71.03 GB, 4.2 MB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
