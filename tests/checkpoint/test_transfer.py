"""What a network and a hub do to a fetch: each failure is survived, or is one sentence with what to do."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import httpx2
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import close_session

from onebox.checkpoint import fetch, part, retry
from onebox.checkpoint.fetch import plan_tensors, plan_whole, run_fetch
from onebox.checkpoint.hub import describe_remote
from onebox.checkpoint.hub_errors import hub_error
from onebox.spec.errors import DoesNotFitError, OneboxError, UsageError, WriteError
from onebox.spec.modules import ModuleClass
from tests.hub_server import Fault, HubServer, StoredFile

REPO = "Qwen/Small-FP8"
SHARED = frozenset({ModuleClass.SHARED})
WEIGHTS = r"\.safetensors$"
AGAIN = "run the same command again"


@pytest.fixture
def fp8(hub, checkpoints):
    hub.add(REPO, checkpoints / "fp8-sharded")
    return checkpoints / "fp8-sharded"


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(part, "RECORD_BYTES", 20_000)


def files_of(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file() and p.name != "onebox_source.json"}


def sentence(call) -> str:
    """The one sentence that `call` ends with."""
    with pytest.raises(OneboxError) as error:
        call()
    text = str(error.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


def test_a_repository_that_does_not_exist(hub):
    assert "The hub has no Qwen/None that you may read: check the name" in sentence(
        lambda: describe_remote("Qwen/None")
    )


def test_a_revision_that_does_not_exist(hub, fp8):
    assert "but not this revision" in sentence(lambda: describe_remote(f"{REPO}@v9"))


def test_a_gated_repository_is_read_with_the_token_and_the_token_goes_to_the_hub_alone(hub, fp8, tmp_path, monkeypatch):
    hub.gate(REPO, "hf_right")
    text = sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    assert "is gated: ask for access" in text
    assert "hf auth login" in text
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "your token may not read it" in sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    monkeypatch.delenv("HF_TOKEN")
    Path(constants.HF_TOKEN_PATH).write_text("hf_right")
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(fp8)


@pytest.mark.parametrize(("path", "status"), [("/api/", 429), ("/api/", 503), (WEIGHTS, 500), ("config.json", 502)])
def test_a_busy_hub_is_asked_again(hub, fp8, tmp_path, path, status):
    hub.fail(Fault.STATUS, status=status, times=3, path=path)
    run_fetch(plan_tensors(REPO, SHARED, tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").exists()


def test_a_throttling_hub_is_given_the_time_it_asks_for(hub, fp8, tmp_path):
    hub.fail(Fault.STATUS, status=429, Retry_After="1", path=WEIGHTS)
    waits: list[str] = []
    began = time.monotonic()
    run_fetch(plan_whole(REPO, tmp_path / "out"), on_wait=waits.append)
    assert time.monotonic() - began >= 1
    assert waits == ["the hub answers 429: trying again in 1 s"]


@pytest.mark.parametrize("header", [{"Retry_After": "900"}, {"RateLimit": '"resolvers";r=0;t=900'}])
def test_a_hub_that_asks_for_too_much_time_is_not_waited_for(hub, fp8, tmp_path, header):
    hub.fail(Fault.STATUS, status=429, path=WEIGHTS, times=10, **header)
    text = sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    assert "throttles" in text
    assert f"wait 900 s and {AGAIN}" in text


def test_a_hub_that_stays_broken(hub, fp8, tmp_path):
    hub.fail(Fault.STATUS, status=503, path=WEIGHTS, times=1000)
    text = sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    assert "The hub fails at model-0000" in text
    assert "what has arrived is kept" in text


def test_connections_that_are_always_cut(hub, fp8, tmp_path):
    hub.fail(Fault.CUT, path=WEIGHTS, times=1000)
    text = sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    assert "was cut" in text
    assert f"{AGAIN} to resume" in text


def test_a_connection_that_falls_silent_is_replaced(hub, fp8, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.fail(Fault.STALL, path=WEIGHTS, after_bytes=30_000)
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(fp8)


def test_a_signed_address_that_expires_is_asked_for_again(hub, fp8, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "REQUEST_BYTES", 100_000)
    hub.signatures_left = 3
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(fp8)
    assert any(served.status == 403 for served in hub.requests)


def test_a_renamed_repository_is_followed(hub, fp8, tmp_path):
    hub.renamed["Qwen/Old"] = REPO
    run_fetch(plan_whole("Qwen/Old", tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(fp8)


def test_a_branch_that_moves_does_not_move_a_fetch_that_has_begun(hub, fp8, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "MAX_RETRIES", 0)
    hub.fail(Fault.CUT, path=WEIGHTS, after_bytes=100_000)
    sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    hub.add(REPO, checkpoints / "bf16-fused-sharded")
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(fp8)


def test_a_file_that_changes_under_its_commit_is_refused(hub, fp8, tmp_path):
    plan = plan_tensors(REPO, SHARED, tmp_path / "out")
    stored = hub.repositories[REPO].commits[plan.commit]
    for name in [name for name in stored if name.endswith(".safetensors")]:
        stored[name] = StoredFile(stored[name].content[::-1], is_lfs=True)
    assert "changed on the hub while it was read" in sentence(lambda: run_fetch(plan))


@pytest.mark.parametrize("damaged", ["safetensors", "tokenizer.json"])
def test_bytes_that_are_changed_on_the_way_do_not_get_their_name(hub, fp8, tmp_path, damaged):
    hub.damages = damaged
    text = sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    assert "arrived with another hash than the hub states" in text
    assert not list((tmp_path / "out").glob(f"*{damaged}"))
    hub.damages = None
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(fp8)


def test_a_range_that_the_storage_refuses(hub, fp8, tmp_path):
    hub.fail(Fault.STATUS, status=416, path=WEIGHTS, times=1000)
    text = sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    assert "refuses a range of model-0000" in text
    assert "hf auth login" in text


def test_a_server_that_knows_no_ranges_is_named(hub, fp8, tmp_path):
    hub.ignores_ranges = True
    text = sentence(lambda: plan_tensors(REPO, SHARED, tmp_path / "out"))
    assert "the answer is another range (none): check the proxy" in text


def test_no_network_at_all(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    text = sentence(lambda: describe_remote(REPO))
    assert "127.0.0.1:1 cannot be reached" in text
    assert "check the network" in text


def test_a_name_that_cannot_be_resolved(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://no-such-hub.invalid")
    text = sentence(lambda: describe_remote(REPO))
    assert "the name of no-such-hub.invalid cannot be resolved; check the network, DNS and HF_ENDPOINT" in text


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://huggingface.co", "http://"])
def test_an_endpoint_that_is_no_address(hub, monkeypatch, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert "check HF_ENDPOINT" in sentence(lambda: describe_remote(REPO))


def test_a_network_that_was_switched_off(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set; unset it" in sentence(lambda: describe_remote(REPO))


def test_a_proxy_that_is_not_there(hub, fp8, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    close_session()
    assert "HTTP_PROXY" in sentence(lambda: describe_remote(REPO))
    close_session()


def test_a_proxy_that_wants_a_login(hub, fp8, tmp_path):
    hub.fail(Fault.STATUS, status=407, path=WEIGHTS)
    text = sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))
    assert "The proxy asks for a login" in text
    assert "HTTPS_PROXY" in text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_that_nobody_signed(tmp_path, monkeypatch):
    certificate = tmp_path / "certificate.pem"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", certificate]
    make = ["openssl", "req", "-x509", *key, "-out", tmp_path / "part.pem", "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run(make, check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + (tmp_path / "part.pem").read_text())
    with HubServer(certificate) as hub:
        hub.use(monkeypatch, tmp_path / "home")
        text = sentence(lambda: describe_remote(REPO))
        close_session()
    assert "is not trusted (self-signed certificate)" in text
    assert "SSL_CERT_FILE" in text


def test_a_disk_without_room_is_refused_before_the_first_byte(hub, fp8, tmp_path, monkeypatch):
    plan = plan_whole(REPO, tmp_path / "out")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DoesNotFitError, match=r"The rest of Qwen/Small-FP8 needs 0\.27 GB in .* 0\.00 GB are free"):
        run_fetch(plan)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_keeps_what_is_there(hub, fp8, tmp_path, monkeypatch):
    write, written = os.pwrite, [0]

    def pwrite(file: int, data: memoryview, position: int) -> int:
        written[0] += len(data)
        if written[0] > 1_000_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(WriteError) as error:
        run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert f"free some space and {AGAIN} to resume" in str(error.value)
    monkeypatch.setattr(os, "pwrite", write)
    plan = plan_whole(REPO, tmp_path / "out")
    assert plan.missing_bytes < plan.nbytes
    run_fetch(plan)
    assert files_of(tmp_path / "out") == files_of(fp8)


def test_a_directory_that_may_not_be_written(hub, fp8, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "file" / "out")))


def test_a_file_of_somebody_else_is_not_overwritten(hub, fp8, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "config.json exists and is not the hub's file" in sentence(lambda: run_fetch(plan_whole(REPO, tmp_path)))
    assert (tmp_path / "config.json").read_text() == "{}"


def test_files_that_are_the_hubs_already_are_kept(hub, fp8, tmp_path):
    shutil.copytree(fp8, tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    hub.requests.clear()
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    assert hub.bytes_sent(WEIGHTS) == 0
    assert files_of(tmp_path / "out") == files_of(fp8)


def test_a_directory_holds_one_repository(hub, fp8, checkpoints, tmp_path):
    hub.add("Qwen/Other", checkpoints / "fp8")
    run_fetch(plan_tensors(REPO, SHARED, tmp_path / "out"))
    for other in (("Qwen/Other", SHARED), (f"{REPO}@main", SHARED), (REPO, frozenset({ModuleClass.LM_HEAD}))):
        with pytest.raises(UsageError, match=r"holds Qwen/Small-FP8 \(only shared expert\), not what is asked for"):
            plan_tensors(*other, tmp_path / "out")
    with pytest.raises(UsageError, match="not what is asked for"):
        plan_whole(REPO, tmp_path / "out")


def test_a_fetched_file_that_was_removed_is_missed(hub, fp8, tmp_path):
    run_fetch(plan_whole(REPO, tmp_path / "out"))
    (tmp_path / "out" / "config.json").unlink()
    assert "has been removed or changed since" in sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))


def test_two_processes_do_not_write_one_directory(hub, fp8, tmp_path):
    (tmp_path / "out").mkdir()
    with fetch._locked(tmp_path / "out"):
        assert "Another onebox is writing" in sentence(lambda: run_fetch(plan_whole(REPO, tmp_path / "out")))


def exceptions_of(library) -> list[type[BaseException]]:
    kinds = [getattr(library, name) for name in library.__all__]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize(
    "kind", [*exceptions_of(httpx), *exceptions_of(httpx2)], ids=lambda kind: f"{kind.__module__}.{kind.__name__}"
)
def test_whatever_the_http_library_raises_is_a_sentence(kind, monkeypatch):
    request = httpx2.Request("GET", "https://example.invalid")
    options = (
        {"request": request, "response": httpx2.Response(418, request=request)} if "Status" in kind.__name__ else {}
    )
    try:
        error = kind("it broke", **options)
    except TypeError:
        error = kind()

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    assert sentence(lambda: describe_remote(REPO)).count(REPO) >= 1


@pytest.mark.parametrize(
    "error",
    [
        errors.OfflineModeIsEnabled("offline"),
        errors.LocalEntryNotFoundError("not here"),
        errors.FileMetadataError("no etag"),
        errors.LocalTokenNotFoundError("no token"),
        TimeoutError("timed out"),
        ConnectionResetError(errno.ECONNRESET, "reset by peer"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        ValueError("odd"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_sentences(error):
    text = str(hub_error(error, REPO, "https://huggingface.co"))
    assert text.startswith(f"{REPO} could not be read from the hub: ")
    assert text.endswith(".")


def test_ctrl_c_stops_a_pull_at_once_and_a_second_one_ends_it(hub, fp8, tmp_path):
    hub.bytes_per_second = 60_000
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    command = [sys.executable, "-m", "onebox.cli.main", "pull", REPO, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(
        path.stat().st_blocks for path in (tmp_path / "out").glob("*.safetensors.part")
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)  # the rest would take a quarter of an hour
    assert (process.returncode, said) == (130, "onebox: stopped.\n")
    hub.bytes_per_second = 0
    hub.settle()
    hub.requests.clear()
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "")
    assert 0 < hub.bytes_sent(WEIGHTS) < sum(path.stat().st_size for path in fp8.glob("*.safetensors"))
    assert files_of(tmp_path / "out") == files_of(fp8)
