"""`python -m benchmarks.soak`: runs the soak and prints its report; status 1 if any promise was broken."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.soak.load import LoadSize
from benchmarks.soak.report import health_misses, record, report
from benchmarks.soak.run import Soak, SoakOptions

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    given = _parse(arguments)
    directory = given.directory or Path(tempfile.mkdtemp(prefix="onebox-soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    size = LoadSize(
        given.clients,
        0 if given.no_hostile else max(1, given.clients // 2),
        has_sockets=not given.no_hostile,
        only=given.only,
        without=given.without,
    )
    options = SoakOptions(given.seconds, given.seed, size, directory, has_faults=not given.no_faults)
    print(f"seed {given.seed}, {given.seconds:.0f} s, log and failed bodies in {directory}", flush=True)
    soak = asyncio.run(_run(options))
    if given.json:
        given.json.write_text(json.dumps(record(soak), indent=1))
    print(report(soak))
    return 1 if soak.ledger.failures else 0


async def _run(options: SoakOptions) -> Soak:
    soak = Soak(options)
    await soak.run()
    for sample in health_misses(soak):
        at = sample.at - soak.ledger.began
        text = (
            f"at {at:.1f} s: {sample.latency_s:.2f} s ({sample.delay_s:.2f} s of it for a core), status {sample.status}"
        )
        soak.ledger.fail("health", text)
    return soak


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long; default 300")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="of all clients and faults")
    parser.add_argument("--clients", type=int, default=6, help="ordinary clients; half as many hostile ones")
    parser.add_argument("--no-faults", action="store_true", help="plant no operator's faults: one steady life")
    parser.add_argument("--no-hostile", action="store_true", help="ordinary clients alone")
    parser.add_argument("--only", default="", help="pattern of the kinds of hostile requests to send")
    parser.add_argument("--without", default="", help="pattern of those to leave out")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--directory", type=Path, help="for the server's log and the bodies of failed requests")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
