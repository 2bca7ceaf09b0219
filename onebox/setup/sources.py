"""The sources of a recipe: which lie here, what is to be fetched of the others, and the build that they give.

A source is used from its directory, from the Hugging Face cache, or from what an earlier run fetched. Otherwise it is
fetched: the tensors that the build takes, and no more.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from onebox.checkpoint.bind import bind
from onebox.checkpoint.build import BuildPlan, output_bytes, plan_build
from onebox.checkpoint.fetch import FetchPlan, plan_tensors, plan_whole, run_fetch
from onebox.checkpoint.hub import find_source
from onebox.checkpoint.inspect import report_on
from onebox.checkpoint.partial import classes_used
from onebox.checkpoint.recipe import BuildSource, BuildSources, Recipe, open_source
from onebox.checkpoint.source import open_checkpoint
from onebox.setup.place import Place
from onebox.setup.recipe_file import RecipeSource
from onebox.spec.errors import UnreadableError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass

__all__ = ["ReportProgress", "Sources", "locate_sources"]

ReportProgress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Called with what is done and its bytes; its context gives the function to be called with the bytes that are done."""
Uses = frozenset[ModuleClass] | None
"""The module classes that are taken from a source; None: all."""


@dataclass(frozen=True)
class _Located:
    """One source: the directory where it lies or will lie, and how it gets there."""

    source: RecipeSource
    uses: Uses
    directory: Path
    fetch: FetchPlan | None = None
    """None: it lies there."""

    @property
    def missing_bytes(self) -> int:
        return self.fetch.missing_bytes if self.fetch else 0

    def opened(self) -> BuildSource:
        return open_source(self.source.role, self.directory)

    def foreseen(self) -> BuildSource:
        """As `opened`, before it is fetched: from the headers alone."""
        if self.fetch is None or self.fetch.is_complete:
            return self.opened()
        checkpoint = self.fetch.checkpoint
        return BuildSource(self.source.role, checkpoint, bind(checkpoint))


@dataclass(frozen=True)
class Sources:
    """All sources of a recipe. `formats` are None if the base is served as it is."""

    located: tuple[_Located, ...]
    formats: Recipe | None

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be fetched."""
        return sum(one.missing_bytes for one in self.located)

    def describe_missing(self) -> list[str]:
        """Each source of which something is missing, with sizes."""
        return [
            f"{one.missing_bytes / 1e9:.2f} GB of {one.fetch.repo}"
            + ("" if one.uses is None else f" ({', '.join(sorted(one.uses))})" if len(one.uses) < 4 else "")
            for one in self.located
            if one.fetch and one.missing_bytes
        ]

    def output(self) -> tuple[ModelSpec, dict[ModuleClass, int]]:
        """The model's shape and the bytes per class of what will be served, from headers alone."""
        opened = [one.foreseen() for one in self.located]
        base = opened[0]
        if self.formats is None:
            return base.checkpoint.spec, report_on(base.checkpoint, base.binding, is_deep=False).class_bytes
        return output_bytes(self.formats, _build_sources(opened))

    def fetch(self, progress: ReportProgress, say: Callable[[str], None]) -> None:
        """Fetches what is missing, one source after the other."""
        for one in self.located:
            if one.fetch and not one.fetch.is_complete:
                with progress(f"fetching {one.fetch.repo}", one.fetch.nbytes) as on_bytes:
                    run_fetch(one.fetch, on_bytes, say)

    def build_plan(self) -> BuildPlan:
        """The build of these sources, which all lie here."""
        if self.formats is None:
            raise ValueError("nothing is built of a recipe without formats")
        return plan_build(self.formats, _build_sources([one.opened() for one in self.located]))


def _build_sources(opened: list[BuildSource]) -> BuildSources:
    by_role = {source.role: source for source in opened}
    return BuildSources(by_role["base"], by_role.get("fp8"), by_role.get("mtp"))


def locate_sources(place: Place) -> Sources:
    """Finds every source of the recipe; asks the hub only for those of which nothing is known here."""
    recipe = place.recipe
    roles = {source.role for source in recipe.sources}
    located = []
    for source in recipe.sources:
        uses = None if recipe.formats is None else classes_used(recipe.formats, source.role, roles)
        located.append(_locate(place, source, uses))
    return Sources(tuple(located), recipe.formats)


def _locate(place: Place, source: RecipeSource, uses: Uses) -> _Located:
    if source.directory is not None:
        if not source.directory.is_dir():
            raise UnreadableError(
                f"{source.directory}, the {source.role} source of {place.recipe.path}, is not a directory."
            )
        open_checkpoint(source.directory)
        return _Located(source, uses, source.directory)
    text = str(source.hub_id)
    directory = place.source_directory(source.hub_id)
    cached = None if directory.is_dir() else find_source(text, uses)
    if cached:
        return _Located(source, uses, cached)
    if uses is None:
        return _Located(source, uses, directory, plan_whole(text, directory))
    with_side_files = source.role == "base"
    return _Located(source, uses, directory, plan_tensors(text, uses, directory, with_side_files=with_side_files))
