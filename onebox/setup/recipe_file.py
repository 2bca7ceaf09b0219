"""Recipes as TOML files: the sources of a checkpoint, the formats to build, and how to serve it.

    summary = "one line"
    model = "qwen3.5-122b-a10b"

    [sources]                                   # owner/name, owner/name@revision, or a directory (/..., ./..., ~/...)
    base = "Intel/Qwen3.5-122B-A10B-int4-AutoRound"
    fp8 = "Qwen/Qwen3.5-122B-A10B-FP8"          # optional
    mtp_from = "./bf16"                         # optional; relative to the file

    [build]                                     # formats of `onebox build`; without it the base is served as it is
    lm_head = "int8"
    expert_layers = ["0-3=int4"]

    [serve]                                     # options of `onebox serve`, with _ for -
    max_model_len = 131072

Recipes that ship are `recipes/MODEL/NAME.toml`. Unknown keys and wrong values are errors that name file and key; the
`[serve]` table is checked by the command that knows those options.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onebox.checkpoint.layer_targets import parse_layer_target
from onebox.checkpoint.recipe import FORMATS, Recipe, TargetFormat
from onebox.checkpoint.repository import HubId
from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["DEFAULT_RECIPE", "RecipeSource", "SetupRecipe", "find_recipe", "read_recipe", "shipped_recipes"]

DEFAULT_RECIPE = "hybrid"
_SHIPPED = Path(__file__).parent / "recipes"
_KEYS = {"summary": str, "model": str, "sources": dict, "build": dict, "serve": dict}
_ROLES = {"base": "base", "fp8": "fp8", "mtp_from": "mtp"}
"""Key in the file -> role in a build."""
_BUILD: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("experts", "experts_down", "attention", "delta", "shared"), FORMATS),
    "mtp": tuple(TargetFormat),
    "lm_head": ("keep", "bf16", "int8"),
}
_LAYERS = "expert_layers"


@dataclass(frozen=True)
class RecipeSource:
    """Where a build takes modules from: a repository on the hub, or a directory here."""

    role: str
    hub_id: HubId | None = None
    directory: Path | None = None

    def __str__(self) -> str:
        return str(self.directory or self.hub_id)


@dataclass(frozen=True)
class SetupRecipe:
    """A recipe file, read and checked."""

    path: Path
    summary: str
    model: str
    sources: tuple[RecipeSource, ...]
    formats: Recipe | None
    """The formats to build; None: the base is served as it is."""
    serve: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def output_name(self) -> str:
        """The name of the directory that is built."""
        return f"{self.model}-{self.name}"

    def source(self, role: str) -> RecipeSource | None:
        return next((source for source in self.sources if source.role == role), None)


def shipped_recipes(model: str | None = None) -> dict[str, list[str]]:
    """The names of the recipes that ship, by model, the default first."""
    found: dict[str, list[str]] = {}
    for path in sorted(_SHIPPED.glob("*/*.toml"), key=lambda path: (path.stem != DEFAULT_RECIPE, path.stem)):
        if model in (None, path.parent.name):
            found.setdefault(path.parent.name, []).append(path.stem)
    return dict(sorted(found.items()))


def find_recipe(model: str, asked: str = DEFAULT_RECIPE) -> SetupRecipe:
    """The recipe of this name for `model`, or the recipe in the file `asked` (a path that ends in .toml)."""
    if asked.endswith(".toml"):
        recipe = read_recipe(Path(asked))
        if recipe.model != model:
            raise UsageError(f"{asked} is a recipe for {recipe.model}, not for {model}: name that model.")
        return recipe
    known = shipped_recipes()
    if model not in known:
        raise UsageError(
            f"There is no recipe for {model!r}; there are some for {', '.join(known)}. "
            "Name a file of your own with --recipe FILE.toml."
        )
    if asked not in known[model]:
        raise UsageError(
            f"{model} has no recipe {asked!r}; it has {', '.join(known[model])}. A file of your own ends in .toml."
        )
    return read_recipe(_SHIPPED / model / f"{asked}.toml")


def read_recipe(path: Path) -> SetupRecipe:
    """The recipe in a file."""
    table = _read(path)
    _check_keys(path, "", table, _KEYS)
    for key, kind in _KEYS.items():
        if key in table and not isinstance(table[key], kind):
            raise UsageError(f"{path}: {key} must be a {'table' if kind is dict else 'text'}, not {table[key]!r}.")
    model = table.get("model", "")
    if not model or model in (".", "..") or "/" in model:
        raise UsageError(f"{path}: model is {model!r}; it takes a short name such as qwen3.5-122b-a10b.")
    sources = _sources(path, table.get("sources", {}))
    formats = _formats(path, table["build"], sources) if "build" in table else None
    if formats is None and len(sources) > 1:
        raise UsageError(
            f"{path}: [sources] has {len(sources)} sources, and no [build] table says what is built of them."
        )
    return SetupRecipe(path, table.get("summary", ""), model, sources, formats, table.get("serve", {}))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnreadableError(f"{path} does not exist: name a recipe file.") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}.") from None


def _check_keys(path: Path, table_name: str, table: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        where = f"[{table_name}] {unknown[0]!r}" if table_name else repr(unknown[0])
        raise UsageError(f"{path}: {where} is not known; the known keys are {', '.join(known)}.")


def _sources(path: Path, table: dict[str, Any]) -> tuple[RecipeSource, ...]:
    _check_keys(path, "sources", table, _ROLES)
    if "base" not in table:
        raise UsageError(f"{path}: [sources] has no base, the checkpoint that everything else is added to.")
    return tuple(_source(path, key, table[key]) for key in _ROLES if key in table)


def _source(path: Path, key: str, text: Any) -> RecipeSource:
    if isinstance(text, str):
        if text.startswith(("/", "./", "../", "~/")) or text in (".", ".."):
            directory = Path(text).expanduser()
            return RecipeSource(_ROLES[key], directory=path.parent.absolute() / directory)
        hub_id = HubId.parse(text)
        if hub_id:
            return RecipeSource(_ROLES[key], hub_id=hub_id)
    raise UsageError(
        f"{path}: [sources] {key} is {text!r}; it takes owner/name or owner/name@revision of the hub, or a directory "
        "that begins with /, ./, ../ or ~/."
    )


def _formats(path: Path, table: dict[str, Any], sources: tuple[RecipeSource, ...]) -> Recipe:
    _check_keys(path, "build", table, (*_BUILD, _LAYERS))
    layers = table.get(_LAYERS, [])
    if not isinstance(layers, list) or not all(isinstance(text, str) for text in layers):
        raise UsageError(f'{path}: [build] {_LAYERS} is {layers!r}; it takes a list of texts such as ["0-3=int4"].')
    targets = {key: value for key, value in table.items() if key != _LAYERS}
    for key, value in targets.items():
        if value not in _BUILD[key]:
            raise UsageError(f"{path}: [build] {key} is {value!r}; it takes one of {', '.join(_BUILD[key])}.")
    has_fp8 = any(source.role == "fp8" for source in sources)
    given: dict[str, Any] = {key: TargetFormat(value) for key, value in targets.items()}
    try:
        given[_LAYERS] = tuple(parse_layer_target(text) for text in layers)
        return Recipe.completed(given, has_fp8=has_fp8)
    except UsageError as error:
        raise UsageError(f"{path}: [build] {error}") from None
