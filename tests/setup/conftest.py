"""A process to run commands in."""

import pytest

from tests.setup.nursery import Nursery


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery
