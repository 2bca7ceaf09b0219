"""The soak's pieces together, for a few seconds: a real server, a load, a quiet point, SIGTERM, a report."""

import asyncio
import json

from benchmarks.soak.clients import References
from benchmarks.soak.load import LoadSize
from benchmarks.soak.report import record, report
from benchmarks.soak.run import Soak, SoakOptions
from benchmarks.soak.scenarios import reference_scenarios


def test_a_short_soak_of_ordinary_clients_finds_nothing_wrong(tmp_path):
    size = LoadSize(num_ordinary=2, num_hostile=0, has_floods=False, has_sockets=False)
    options = SoakOptions(seconds=4, seed=1, size=size, directory=tmp_path, has_faults=False)

    async def run():
        soak = Soak(options, References(scenarios=reference_scenarios()[::9]))
        await soak.run()
        return soak

    soak = asyncio.run(run())
    assert not soak.ledger.failures, report(soak)
    assert report(soak).strip().startswith("PASSED")
    assert soak.ledger.num_compared >= 7
    assert [len(life.points) > 0 for life in soak.lives] == [True]
    assert soak.probes.health
    assert json.loads(json.dumps(record(soak)))["num_failures"] == {}
