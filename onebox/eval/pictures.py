"""Own pictures: a directory of images, each with a file of the same name that says what is on it.

`page.png` beside `page.json`, an object: its keys are asked for and every value must be equal. Beside `page.txt`: the
text is asked for and compared by characters (`transcript`). Nothing of an image is changed on its way to the server.
"""

import base64
import json
import unicodedata
from pathlib import Path

import numpy as np

from onebox.eval.question import Check, Json, Question, Truth, TruthKind
from onebox.spec.errors import UnreadableError

__all__ = ["MOST_ERRORS", "character_errors", "picture_file_part", "picture_questions"]

MOST_ERRORS = 0.02
"""A transcript is right up to this many wrong, missing or added characters for each expected one."""
_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}
_FIELDS = (
    "Read this document. Extract the following as JSON: {}. Give every value as it is printed; amounts as numbers."
)
_TEXT = "Transcribe all text of this picture, line by line, without any comment."
_FIELD_TOKENS, _TOKENS_A_CHARACTER = 512, 1


def picture_questions(directory: Path) -> list[Question]:
    """One question for each image, in the order of their names."""
    if not directory.is_dir():
        raise UnreadableError(f"{directory} is not a directory; --pictures takes one with images and their answers.")
    images = sorted(path for path in directory.iterdir() if path.suffix.lower() in _TYPES)
    if not images:
        raise UnreadableError(f"{directory} holds no image ({', '.join(_TYPES)}).")
    named = {path.stem for path in images}
    for answer in sorted(directory.iterdir()):
        if answer.suffix in (".json", ".txt") and answer.stem not in named:
            raise UnreadableError(f"{answer} has no image of the same name; remove it or add {answer.stem}.png.")
    if len(named) < len(images):
        raise UnreadableError(f"{directory} has several images with one name and different endings; rename them.")
    return [_question(path) for path in images]


def _question(path: Path) -> Question:
    answers = [answer for answer in (path.with_suffix(".json"), path.with_suffix(".txt")) if answer.is_file()]
    if len(answers) != 1:
        said = "both" if answers else "neither"
        raise UnreadableError(f"{path} has {said} {path.stem}.json (fields) and {path.stem}.txt (text); give one.")
    request, truth, max_tokens = _expected(answers[0])
    parts = [picture_file_part(path), {"type": "text", "text": request}]
    body = {"messages": [{"role": "user", "content": parts}]}
    group = "fields" if truth.kind is TruthKind.JSON else "text"
    return Question(f"{Check.PICTURES.value}/{path.stem}", Check.PICTURES, group, body, truth, max_tokens)


def _expected(path: Path) -> tuple[str, Truth, int]:
    """The request, the truth and the limit in tokens."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else text.strip()
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableError(f"{path} cannot be read as UTF-8 text ({error}).") from None
    except json.JSONDecodeError as error:
        raise UnreadableError(f"{path}, line {error.lineno}: it is not JSON ({error.msg}).") from None
    if path.suffix == ".json":
        if not isinstance(value, dict) or not value:
            raise UnreadableError(f"{path} must be a JSON object of the fields on the picture, and is not.")
        return _FIELDS.format(", ".join(value)), Truth(TruthKind.JSON, value), _FIELD_TOKENS + len(text)
    if not value:
        raise UnreadableError(f"{path} is empty; it must hold the text on the picture.")
    return _TEXT, Truth(TruthKind.TRANSCRIPT, [value]), _FIELD_TOKENS + _TOKENS_A_CHARACTER * len(value)


def picture_file_part(path: Path) -> Json:
    """An image file as a part of a message, its bytes as they are."""
    from PIL import Image

    kind = _TYPES.get(path.suffix.lower())
    if kind is None:
        raise UnreadableError(f"{path} is not an image by its name ({', '.join(_TYPES)}).")
    try:
        data = path.read_bytes()
        with Image.open(path) as picture:
            picture.verify()
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadableError(f"{path} cannot be read as an image ({error}).") from None
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}


def character_errors(said: str, expected: str) -> float:
    """Wrong, missing and added characters (Levenshtein) for each expected one; whitespace counts as one space."""
    one, two = (_codes(text) for text in (said, expected))
    places = np.arange(len(one) + 1)
    row = places.copy()
    for number, letter in enumerate(two, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (one != letter))
        # An added character costs one more than the place before it: a running minimum along the row.
        row = np.minimum.accumulate(np.concatenate(([number], best)) - places) + places
    return float(row[-1]) / max(1, len(two))


def _codes(text: str) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    joined = " ".join(unicodedata.normalize("NFC", text).split())
    return np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
