"""The files beside the weights that serving reads: tokenizer, chat template, picture preprocessors, sampling defaults.

`onebox inspect` and the start of `onebox serve` report the same problems with the same advice. Only presence and form
are checked here; what the files say is checked where they are used, in `onebox.text`.
"""

from dataclasses import replace
from pathlib import Path

from onebox.checkpoint.bind import Problem, ProblemKind
from onebox.spec.errors import UnreadableError
from onebox.spec.model import ModelSpec, read_json

__all__ = ["side_file_problems"]

_LFS_START = b"version https://git-lfs.github.com"
_SAME = "quantised versions of one model share this file, so copy it from the model that this one was made from"


def side_file_problems(
    directory: Path, spec: ModelSpec, *, has_tower: bool = True, has_template: bool = False
) -> list[Problem]:
    """Side files that are missing or unreadable; fatal: `onebox serve DIR` cannot start without this file.

    `has_tower`: the vision tower will be loaded. `has_template`: a chat template is given on the command line.
    """
    problems = _tokenizer(directory)
    if not has_template:
        problems += _chat_template(directory)
    if spec.vision is not None and has_tower:
        problems += _preprocessors(directory)
    problems += _generation_config(directory)
    return problems


def _tokenizer(directory: Path) -> list[Problem]:
    name = "tokenizer.json"
    if not (directory / name).exists():
        older = " (vocab.json and merges.txt are not read)" if (directory / "vocab.json").exists() else ""
        return [_problem(name, f"{name} is missing{older}, so no text can be served: {_SAME}.")]
    return _unreadable(directory, name)


def _chat_template(directory: Path) -> list[Problem]:
    name, older = "chat_template.jinja", "tokenizer_config.json"
    if (directory / name).exists():
        return _pointer(directory, name)
    if (directory / older).exists():
        problems = _unreadable(directory, older)
        if problems or isinstance(read_json(directory / older).get("chat_template"), str):
            return problems
    message = (
        f"The chat template is missing, both {name} and chat_template in {older}, so chats cannot be served: "
        f"{_SAME}, or give `--chat-template FILE`."
    )
    return [_problem(name, message)]


def _preprocessors(directory: Path) -> list[Problem]:
    """Notes, never fatal: without these files pictures are refused and text works."""
    problems = []
    for kind, name, section in (
        ("image", "preprocessor_config.json", "image_processor"),
        ("video", "video_preprocessor_config.json", "video_processor"),
    ):
        file = next((file for file in (name, "processor_config.json") if (directory / file).exists()), None)
        broken = _unreadable(directory, file) if file else []
        problems += [replace(problem, is_fatal=False) for problem in broken]
        is_there = file == name or (file and not broken and isinstance(read_json(directory / file).get(section), dict))
        if not broken and not is_there:
            message = f"{name} is missing, so {kind}s are refused and text works: {_SAME}."
            problems.append(_problem(name, message, is_fatal=False))
    return problems


def _generation_config(directory: Path) -> list[Problem]:
    name = "generation_config.json"
    if (directory / name).exists():
        return _unreadable(directory, name)
    message = (
        f"{name} is missing, so requests that set no sampling are sampled at temperature 1.0, and only config.json's "
        f"end token ends an answer: {_SAME}."
    )
    return [_problem(name, message, is_fatal=False)]


def _unreadable(directory: Path, name: str) -> list[Problem]:
    """The problem of a JSON file that exists and is not a JSON object."""
    pointer = _pointer(directory, name)
    if pointer:
        return pointer
    try:
        read_json(directory / name)
    except UnreadableError as error:
        return [_problem(name, str(error))]
    return []


def _pointer(directory: Path, name: str) -> list[Problem]:
    with (directory / name).open("rb") as file:
        if file.read(len(_LFS_START)) != _LFS_START:
            return []
    message = f"{name} is a Git LFS pointer, not the file: run `git lfs pull`, or download it with `onebox pull`."
    return [_problem(name, message)]


def _problem(name: str, message: str, *, is_fatal: bool = True) -> Problem:
    return Problem(ProblemKind.SIDE_FILE, name, message, is_fatal)
