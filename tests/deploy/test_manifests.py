"""The manifests and compose files hold against the schemas of who reads them, and against each other."""

import copy
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from onebox.fleet.config import read_fleet_config

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
COMPOSE = ROOT / "deploy" / "compose"
SCHEMAS = Path(__file__).parent / "schemas"


def documents():
    """By kind; what kustomization.yaml lists, which is all that there is."""
    listed = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in MANIFESTS.iterdir()}
    found = [yaml.safe_load((MANIFESTS / name).read_text()) for name in listed]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def validator(document):
    if document["kind"] == "ServiceMonitor":
        return jsonschema_rs.validator_for(json.loads((SCHEMAS / "servicemonitor-0.80.json").read_text()))
    bundle = json.loads((SCHEMAS / "kubernetes-1.35.json").read_text())
    name = bundle["kinds"][f"{document['apiVersion']} {document['kind']}"]
    return jsonschema_rs.validator_for({"$ref": f"#/$defs/{name}", "$defs": bundle["$defs"]})


KINDS = ("Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "ServiceMonitor")


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_is_what_the_api_takes(kind):
    document = documents()[kind]
    check = validator(document)
    check.validate(document)
    # The check can fail: a field that is not there, and one of another type.
    for change in ({"replica": 1}, {"selector": 7}):
        wrong = copy.deepcopy(document)
        wrong["spec"] |= change
        assert not check.is_valid(wrong)


def container():
    (found,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def test_no_kind_is_missing():
    assert set(documents()) == set(KINDS)


def test_manifests_name_what_the_others_have():
    found = documents()
    pod = found["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    selectors = [
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    watched = found["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert watched.items() <= found["Service"]["metadata"]["labels"].items()
    (port,) = found["Service"]["spec"]["ports"]
    assert [each["port"] for each in found["ServiceMonitor"]["spec"]["endpoints"]] == [port["name"]]
    assert port["targetPort"] in [each["name"] for each in container()["ports"]]
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]


def test_what_a_pod_writes_on_the_node_belongs_to_its_user():
    spec = documents()["Deployment"]["spec"]["template"]["spec"]
    (init,) = spec["initContainers"]
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['fsGroup']}"
    places = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
    mounted = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    owned = {mount["name"]: mount["mountPath"] for mount in init["volumeMounts"]}
    assert owned == {name: mounted[name] for name in places}
    assert init["command"] == ["chown", user, *owned.values()]


def test_a_pod_may_start_slowly_and_end_slowly_and_llm_d_finds_it():
    spec = documents()["Deployment"]["spec"]["template"]
    labels = spec["metadata"]["labels"]
    assert labels["llm-d.ai/inferenceServing"] == "true"
    assert labels["llm-d.ai/engine-type"] == "vllm"
    assert {"llm-d.ai/model", "llm-d.ai/role"} <= labels.keys()
    probe = container()["startupProbe"]
    assert probe["httpGet"] == {"path": "/health", "port": "http"}
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    hook = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    (drain_s,) = [int(arg.split("=")[1]) for arg in container()["args"] if arg.startswith("--shutdown-timeout=")]
    assert spec["spec"]["terminationGracePeriodSeconds"] >= hook + drain_s + 30
    paths = (ROOT / "docs" / "api.md").read_text()
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f"`GET {container()[name]['httpGet']['path']}`" in paths


def compose_files():
    return sorted(COMPOSE.glob("*.yaml"))


def test_the_commands_have_options_that_exist():
    known = (ROOT / "docs" / "cli.md").read_text()
    lines = [container()["args"]]
    for path in compose_files():
        services = yaml.safe_load(path.read_text())["services"].values()
        lines += [shlex.split(service["command"]) for service in services]
    for line in lines:
        flags = [re.match(r"--[\w-]+", word).group() for word in line if word.startswith("--")]
        assert flags
        assert all(f"`{flag}" in known or f"{flag} " in known for flag in flags), flags
    assert {line[0] for line in lines} == {"serve", "fleet"}


@pytest.mark.parametrize("path", compose_files(), ids=lambda path: path.name)
def test_a_compose_file_is_what_compose_takes(path):
    content = yaml.safe_load(path.read_text())
    check = jsonschema_rs.validator_for(json.loads((SCHEMAS / "compose-spec.json").read_text()))
    check.validate(content)
    (service,) = content["services"].values()
    assert not check.is_valid({**content, "services": {"x": {**service, "comand": "x"}}})
    mounted = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith("./")]
    assert all((COMPOSE / name).exists() for name in mounted)


def test_what_a_box_writes_lies_in_volumes_that_belong_to_the_images_user():
    content = yaml.safe_load((COMPOSE / "box.yaml").read_text())
    mounted = content["services"]["onebox"]["volumes"]
    written = dict(volume.split(":") for volume in mounted if not volume.endswith(":ro"))
    assert list(written) == list(content["volumes"])
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"--owner=1000 --group=1000 {' '.join(written.values())}\n" in image
    assert "\nUSER 1000\n" in image


@pytest.mark.parametrize(("name", "count"), [("two-boxes", 2), ("many-boxes", 4)])
def test_the_fleets_of_the_compose_files_can_be_read(tmp_path, name, count):
    (tmp_path / "key").write_text("secret\n")
    shutil.copy(COMPOSE / f"{name}.toml", tmp_path)
    config = read_fleet_config(tmp_path / f"{name}.toml")
    assert len(config.members) == count
    assert f"/etc/onebox/{name}.toml" in (COMPOSE / f"{name}.yaml").read_text()
    # Others than this machine are to reach it, and box.yaml publishes what its members name.
    assert config.host == "0.0.0.0"  # noqa: S104
    assert all(member.url.endswith(":8000") for member in config.members)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_same_manifests():
    command = [shutil.which("kubectl"), "kustomize", MANIFESTS]
    rendered = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = {each["kind"]: each for each in yaml.safe_load_all(rendered)}
    assert found == documents()
