import pytest
from hypothesis import HealthCheck, settings

from onebox.model.random import write_random_checkpoint
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random") / "tiny"
    write_random_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(checkpoint):
    return Tokenizer.load(checkpoint)


@pytest.fixture(scope="session")
def template(checkpoint):
    return ChatTemplate.load(checkpoint)
