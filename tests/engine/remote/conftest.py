"""Engine processes without a model."""

import pytest

from onebox.engine.remote.parent import EngineProcess
from tests.engine.remote.processes import SOON, FakeStarter


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> EngineProcess:
    """A process that the tests using it leave as it is."""
    with EngineProcess(FakeStarter(tmp_path_factory.mktemp("calm") / "starts")) as engine:
        engine.wait_ready()
        yield engine
        assert engine.health().num_restarts == 0


@pytest.fixture
def start(tmp_path):
    """Starts processes that may die; the last one is closed."""
    engines = []

    def make(policy=SOON, **options):
        engines.append(EngineProcess(FakeStarter(tmp_path / "starts", **options), policy=policy))
        engines[-1].wait_ready()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
