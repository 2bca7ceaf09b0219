"""`onebox pull` around huggingface_hub, whose network part is replaced: what it asks, refuses and says."""

from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from onebox.checkpoint.pull import pull_checkpoint
from onebox.spec.errors import DoesNotFitError, UnreadableError

FILES = {"model-00001-of-00002.safetensors": 4000, "config.json": 30, "picture.png": 10**15, "weights.gguf": 10**15}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one repository; remembers what was asked of it."""
    asked = SimpleNamespace(downloads=[])
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in FILES.items()]

    def model_info(_, repo, revision=None, files_metadata=False):
        assert files_metadata
        return SimpleNamespace(siblings=siblings)

    def download(repo, **options):
        asked.downloads.append((repo, options))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_only_what_a_checkpoint_needs_is_downloaded(hub, tmp_path, run_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_cli("pull", "Qwen/Some-Model", "--revision", "main")
    assert result.code == 0
    [(repo, options)] = hub.downloads
    assert repo == "Qwen/Some-Model"
    assert options["revision"] == "main"
    assert str(options["local_dir"]) == "models/Some-Model"
    assert "*.safetensors" in options["allow_patterns"]
    assert "onebox inspect models/Some-Model" in result.out


def test_the_size_counts_wanted_files_alone(hub, tmp_path):
    assert pull_checkpoint("Qwen/Some-Model", tmp_path / "out") == 4030


def test_a_disk_without_room_is_refused_before_the_download(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DoesNotFitError, match=r"needs 0\.27 GB in .* 0\.00 GB are free"):
        pull_checkpoint("Qwen/Some-Model", tmp_path / "out")
    assert hub.downloads == []


def test_files_that_are_there_need_no_room(hub, tmp_path, monkeypatch):
    free = (256 << 20) + 31
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(DoesNotFitError):
        pull_checkpoint("Qwen/Some-Model", tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(4000))
    pull_checkpoint("Qwen/Some-Model", tmp_path)


def test_refusals_of_the_hub_are_sentences(hub, tmp_path, monkeypatch):
    response = httpx.Response(404, request=httpx.Request("GET", "https://example.invalid"))

    def absent(*_, **__):
        raise RepositoryNotFoundError("404 no such repository", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", absent)
    with pytest.raises(UnreadableError, match=r"The hub refused 'Qwen/None'.*hf auth login"):
        pull_checkpoint("Qwen/None", tmp_path)


def test_a_broken_connection_says_how_to_go_on(hub, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(UnreadableError, match="Run the same command again to resume"):
        pull_checkpoint("Qwen/Some-Model", tmp_path)


def test_an_impossible_name_is_a_sentence(tmp_path):
    with pytest.raises(UnreadableError, match="is not a repository name"):
        pull_checkpoint("a/b/c d", tmp_path)
