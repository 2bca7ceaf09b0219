"""Recipes: those that ship are complete, and a wrong key or value is an error that names the file and the key."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import onebox
from onebox.checkpoint.recipe import Recipe, TargetFormat
from onebox.cli.serve_arguments import ServeArguments
from onebox.setup.recipe_file import find_recipe, read_recipe, shipped_recipes
from onebox.spec.errors import OneboxError, UnreadableError, UsageError
from onebox.spec.shapes import SHAPES

SHIPPED = [(model, name) for model, names in shipped_recipes().items() for name in names]


@pytest.mark.parametrize(("model", "name"), SHIPPED)
def test_a_recipe_that_ships_is_of_a_known_model_and_can_be_served(model, name):
    recipe = find_recipe(model, name)
    assert (recipe.model, recipe.name) == (model, name)
    assert model in SHAPES
    assert recipe.summary
    assert all(source.hub_id for source in recipe.sources)
    assert ServeArguments.resolve(recipe, []).values["served_model_name"] == [model]


def test_the_recipes_of_the_published_ladder_ship():
    assert shipped_recipes() == {
        "qwen3.5-122b-a10b": ["hybrid", "hybrid-fp8", "int4", "nvfp4-mtp"],
        "qwen3.5-35b-a3b": ["hybrid"],
    }
    formats = {name: find_recipe("qwen3.5-122b-a10b", name).formats for name in shipped_recipes()["qwen3.5-122b-a10b"]}
    fp8, int8, auto = TargetFormat.FP8, TargetFormat.INT8, TargetFormat.AUTO
    assert formats == {
        "int4": None,
        "hybrid": Recipe(shared=fp8, lm_head=int8, mtp=auto),
        "hybrid-fp8": Recipe(shared=fp8, lm_head=int8, mtp=auto, attention=fp8, delta=fp8),
        "nvfp4-mtp": Recipe(mtp=auto),
    }
    as_published = find_recipe("qwen3.5-122b-a10b", "int4")
    assert ServeArguments.resolve(as_published, []).values["mtp_format"] == "int4", "quantised in every recipe"


def test_recipes_are_in_the_wheel():
    root = Path(onebox.__file__).parent
    options = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [str(path.relative_to(root / "setup")) for path in (root / "setup").rglob("*.toml")]
    assert files
    assert all(any(fnmatch(file, pattern) for pattern in options["onebox.setup"]) for file in files)


GOOD = 'model = "m"\n[sources]\nbase = "a/b"\nfp8 = "c/d"\n[build]\nlm_head = "int8"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("model", "modle"), r"my\.toml: 'modle' is not known; the known keys are summary, model"),
        (GOOD.replace("fp8 =", "pf8 ="), r"my\.toml: \[sources\] 'pf8' is not known; the known keys are base, fp8"),
        (GOOD.replace("lm_head", "head"), r"my\.toml: \[build\] 'head' is not known"),
        (GOOD.replace('"int8"', '"int4"'), r"my\.toml: \[build\] lm_head is 'int4'; it takes one of keep, bf16, int8"),
        (GOOD.replace('"int8"', "8"), r"my\.toml: \[build\] lm_head is 8; it takes"),
        (GOOD.replace('"a/b"', '"a/b/c"'), r"my\.toml: \[sources\] base is 'a/b/c'; it takes owner/name"),
        (GOOD.replace('"a/b"', "7"), r"my\.toml: \[sources\] base is 7; it takes owner/name"),
        (GOOD.replace('base = "a/b"', ""), r"my\.toml: \[sources\] has no base"),
        (GOOD.replace('"m"', '"../m"'), r"my\.toml: model is '../m'; it takes a short name"),
        (GOOD.replace('"m"', "3"), r"my\.toml: model must be a text, not 3"),
        ('build = "int8"\n' + GOOD.split("[build]")[0], r"my\.toml: build must be a table, not 'int8'"),
        (GOOD.split("[build]")[0], r"my\.toml: \[sources\] has 2 sources, and no \[build\] table says"),
        (GOOD + "[", r"my\.toml is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path, text, says):
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(OneboxError, match=says):
        read_recipe(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_model_length = 1", r"my\.toml: \[serve\] 'max_model_length' is not an option of onebox serve"),
        ("max_model_len = true", r"my\.toml: \[serve\] max_model_len is True; it takes a text or a number"),
        ("language_model_only = 1", r"my\.toml: \[serve\] language_model_only is 1; it takes true or false"),
        ('max_model_len = "long"', r"my\.toml: \[serve\].*--max-model-len': It takes a whole number"),
        ("port = [1]", r"my\.toml: \[serve\] port is \[1\]; it takes a text or a number"),
    ],
)
def test_what_is_wrong_in_the_serve_table_is_named_with_the_file(tmp_path, text, says):
    path = tmp_path / "my.toml"
    path.write_text(f"{GOOD}[serve]\n{text}\n")
    with pytest.raises(UsageError, match=says):
        ServeArguments.resolve(read_recipe(path), [])


def test_given_options_come_after_the_recipes_and_hold(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(f"{GOOD}[serve]\nmax_model_len = 4096\nmax_num_seqs = 3\nenable_prefix_caching = false\n")
    options = ServeArguments.resolve(read_recipe(path), ["--max-model-len", "2048"]).engine_options()
    assert (options.max_model_len, options.max_num_seqs, options.enable_prefix_caching) == (2048, 3, False)


def test_a_launch_line_of_vllm_is_taken_and_its_notices_are_said_once(capsys):
    given = ["--max-model-len", "32K", "--trust-remote-code"]
    arguments = ServeArguments.resolve(find_recipe("qwen3.5-35b-a3b"), given)
    assert arguments.values["max_model_len"] == 32768
    assert "--trust-remote-code" in capsys.readouterr().out
    assert "--trust-remote-code" not in arguments.arguments
    with pytest.raises(UsageError, match=r"--prot is no option.*did you mean --port"):
        ServeArguments.resolve(find_recipe("qwen3.5-35b-a3b"), ["--prot", "1"])


def test_an_api_key_is_not_shown():
    arguments = ServeArguments.resolve(find_recipe("qwen3.5-35b-a3b"), ["--api-key", "secret", "--api-key=geheim"])
    shown = arguments.shell_text(Path("models/x"))
    assert "secret" not in shown
    assert "geheim" not in shown


def test_sources_are_repositories_or_directories_beside_the_file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(GOOD.replace('"a/b"', '"./a/b"').replace('"c/d"', '"c/d@v1"'))
    base, fp8 = read_recipe(path).sources
    assert base.directory == tmp_path / "a" / "b"
    assert (fp8.hub_id.repo, fp8.hub_id.revision) == ("c/d", "v1")


@pytest.mark.parametrize(
    ("model", "asked", "says"),
    [
        ("qwen9", "hybrid", "There is no recipe for 'qwen9'; there are some for qwen3.5-122b-a10b"),
        ("qwen3.5-35b-a3b", "int4", "qwen3.5-35b-a3b has no recipe 'int4'; it has hybrid"),
    ],
)
def test_an_unknown_recipe_is_refused_with_those_that_are_known(model, asked, says):
    with pytest.raises(UsageError, match=says):
        find_recipe(model, asked)


def test_a_file_must_be_there_and_of_the_model_that_is_named(tmp_path):
    with pytest.raises(UnreadableError, match=r"none\.toml does not exist"):
        find_recipe("m", str(tmp_path / "none.toml"))
    path = tmp_path / "my.toml"
    path.write_text(GOOD)
    with pytest.raises(UsageError, match="is a recipe for m, not for other"):
        find_recipe("other", str(path))
