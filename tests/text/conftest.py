from pathlib import Path

import pytest

import onebox.pocket
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer

POCKET = Path(onebox.pocket.__file__).parent / "model"


@pytest.fixture(scope="session")
def template(checkpoint):
    return ChatTemplate.load(checkpoint)


@pytest.fixture(scope="session")
def merging_tokenizer():
    """The pocket model's: the family's words, normalizer and control tokens, and thousands of merges."""
    return Tokenizer.load(POCKET)
