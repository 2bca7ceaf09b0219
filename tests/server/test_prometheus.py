"""A real Prometheus scrapes the pocket model's server, and every query of the dashboard returns data.

`make metrics-test` fetches Prometheus from Debian and runs this.
"""

import json
import math
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from onebox.server.run import bind
from tests.server.dashboard import ONLY_SOME_MACHINES, ROOT, queries, variables
from tests.server.launching import started

pytestmark = pytest.mark.prometheus
KEY = {"Authorization": "Bearer sk-one"}
LIMIT_S = 120


def program(name):
    found = shutil.which(name) or ROOT / ".prometheus" / "usr" / "bin" / name
    assert Path(found).exists(), f"{name} is not here; `make metrics-test` fetches it"
    return str(found)


def promtool(*arguments, text=""):
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(API's URL, URL of the metrics) of the pocket model, with a key and prefixes on disk."""
    prefixes = tmp_path_factory.mktemp("prefixes")
    with started("--api-key", "sk-one", "--metrics-port", "0", "--prefix-dir", prefixes) as (process, url):
        yield url, process.ready_line.rsplit(" ", 1)[1].strip()


def monitor_job(url, key_file):
    """What the Prometheus operator makes of deploy/kubernetes/monitor.yaml for one pod."""
    monitor = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "monitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    authorization = {"type": endpoint["authorization"]["type"], "credentials_file": str(key_file)}
    return {
        "job_name": monitor["metadata"]["name"] + "-monitor",
        "metrics_path": endpoint["path"],
        "scrape_interval": endpoint["interval"],
        "authorization": authorization,
        "static_configs": [{"targets": [url.partition("//")[2]]}],
    }


@contextmanager
def prometheus(directory, jobs):
    """The URL of one that scrapes these."""
    config = directory / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    checked = promtool("check", "config", config)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with bind("127.0.0.1", 0) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=LIMIT_S)


def ask(url, query):
    """[(labels, value)] of a query; what is not a number is no data."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=LIMIT_S).json()
    assert answer["status"] == "success", (query, answer)
    found = [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]
    return [(labels, value) for labels, value in found if not math.isnan(value)]


def wait_for(condition):
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.5)


def work(url):
    """Answers, of which two share a prompt and repeat themselves, a refusal, and a client that leaves."""
    question = "Count from one to twenty in words, then count again. " * 8
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(
            lambda _: httpx.post(f"{url}/v1/chat/completions", json=body, headers=KEY, timeout=LIMIT_S), range(6)
        )
        assert {answer.status_code for answer in answers} == {200}
    assert httpx.post(f"{url}/v1/chat/completions", json={}, headers=KEY).status_code == 400
    streamed = {**body, "stream": True, "max_tokens": 2000}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=streamed, headers=KEY, timeout=LIMIT_S) as answer:
        next(answer.iter_lines())


def test_every_query_of_the_dashboard_returns_data(served, tmp_path):
    api, metrics = served
    key_file = tmp_path / "key"
    key_file.write_text("sk-one")
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (job,) = scraped
    job = {**job, "static_configs": [{"targets": [metrics.partition("//")[2].removesuffix("/metrics")]}]}
    with prometheus(tmp_path, [job, monitor_job(api, key_file)]) as url:
        wait_for(lambda: _answers(url) and len(ask(url, "up == 1")) == 2)
        # A counter that first appears with a value has not increased for Prometheus: the second round is seen.
        for _ in range(2):
            work(api)
            scraped_later = f"timestamp(onebox:engine_up{{job='onebox'}}) > {time.time() + 1}"
            wait_for(lambda query=scraped_later: ask(url, query))
        empty = {query for query in queries("2m") if not ask(url, always(query))}
        may_be_empty = {query for query in empty if any(name in query.expression for name in ONLY_SOME_MACHINES)}
        assert empty == may_be_empty
        for selector, label in variables().values():
            found = httpx.get(f"{url}/api/v1/label/{label}/values", params={"match[]": selector}).json()["data"]
            assert found
        assert ask(url, "sum(onebox:engine_up) == 2")
        assert not ask(url, "onebox:no_such_metric")


def always(query):
    """What has data also where nothing happens."""
    return query.expression.removesuffix(" > 0") if query.is_event else query.expression


def _answers(url):
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.HTTPError:
        return False


def test_promtool_finds_nothing_but_the_colons_of_vllms_names(served):
    text = httpx.get(served[1]).text
    lint = promtool("check", "metrics", text=text)
    said = (lint.stdout + lint.stderr).splitlines()
    assert said, "promtool said nothing"
    assert [line for line in said if not line.endswith("metric names should not contain ':'")] == []
    broken = promtool("check", "metrics", text=text + "this is no sample\n")
    assert "error while linting" in broken.stdout + broken.stderr


def test_the_scrape_config_is_one_for_prometheus(tmp_path):
    config = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    assert promtool("check", "config", config).returncode == 0
    # So is the part in its comments, for a server without that port.
    lines = config.read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("#   - job_name"))
    commented = [line[1:] for line in lines[start:] if line.startswith("#  ")]
    other = tmp_path / "prometheus.yml"
    (tmp_path / "onebox.key").write_text("sk-one")
    text = "\n".join(["scrape_configs:", *commented]).replace("/etc/prometheus", str(tmp_path))
    other.write_text(text)
    checked = promtool("check", "config", other)
    assert checked.returncode == 0, json.dumps(checked.stderr)
    other.write_text(text.replace("authorization", "authorisation"))
    assert promtool("check", "config", other).returncode != 0
