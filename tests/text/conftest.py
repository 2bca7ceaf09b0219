import pytest

from onebox.text.chat import ChatTemplate


@pytest.fixture(scope="session")
def template(checkpoint):
    return ChatTemplate.load(checkpoint)
