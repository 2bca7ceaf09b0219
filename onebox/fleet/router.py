"""The router in front: its configuration from the fleet's, and its process.

The router is somebody else's program. It sees the members' relays, so that its list of servers never changes.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onebox.fleet.config import FleetConfig
from onebox.spec.errors import UnsupportedError, UsageError

__all__ = ["RouterLaunch", "find_router", "router_launch"]

PLUGIN = "litellm_affinity"
"""The module that LiteLLM loads for the policy cache_lookup; it lies beside LiteLLM's configuration."""
_KEY = "ONEBOX_FLEET_KEY"
"""The variable that LiteLLM takes the members' key from, so that it is in no file."""
_PACKAGES = {"vllm-router": "vllm-router==0.1.16", "litellm": "'litellm[proxy]'"}


@dataclass(frozen=True)
class RouterLaunch:
    """How the router is started."""

    command: list[str]
    environment: dict[str, str]
    files: dict[str, str]
    """Written before the start, by name, into the directory that the command names."""
    ready_path: str
    """Answers 200 when the router takes requests."""


def find_router(config: FleetConfig) -> list[str]:
    """The program: as configured, else beside this Python, else on the PATH."""
    if config.router_command:
        return list(config.router_command)
    beside = Path(sys.executable).parent / config.router
    found = str(beside) if beside.exists() else shutil.which(config.router)
    if found is None:
        raise UnsupportedError(
            f"The router {config.router} is not installed: run `pip install {_PACKAGES[config.router]}`, or name its "
            f"program as router_command in {config.path}."
        )
    return [found]


def router_launch(
    config: FleetConfig, urls: Sequence[str], model: str, directory: Path, free_port: int
) -> RouterLaunch:
    """Over relays at `urls`. `free_port` is for the router's own metrics, where it needs a port for them."""
    make = _litellm if config.router == "litellm" else _vllm_router
    return make(config, urls, model, directory, free_port)


def _vllm_router(
    config: FleetConfig,
    urls: Sequence[str],
    model: str,  # noqa: ARG001 - both routers are described by one signature
    directory: Path,  # noqa: ARG001
    free_port: int,
) -> RouterLaunch:
    """Relays answer at once, so one failure is enough for the breaker, and a try of it after a second.

    With the router's own limits (10 failures) its retries go back to the member that has just failed.
    """
    options = {
        "host": config.host,
        "port": config.port,
        "policy": config.policy,
        "prometheus-port": free_port,
        "balance-abs-threshold": config.balance,
        "health-check-interval-secs": 1,
        "health-check-timeout-secs": max(2, round(config.hang_s)),
        "health-failure-threshold": 1,
        "health-success-threshold": 1,
        "worker-startup-check-interval": 1,
        "cb-failure-threshold": 1,
        "cb-success-threshold": 1,
        "cb-timeout-duration-secs": 1,
        "retry-max-retries": 2 * len(urls) + 4,
        "retry-initial-backoff-ms": 50,
        "retry-max-backoff-ms": 2000,
        "log-level": "warning",
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [*find_router(config), "--worker-urls", *urls, *flags, *config.router_options]
    return RouterLaunch(command, {}, {}, "/readiness")


def _litellm(
    config: FleetConfig,
    urls: Sequence[str],
    model: str,
    directory: Path,
    free_port: int,  # noqa: ARG001
) -> RouterLaunch:
    """Deployments of one model name. Its own health checks are off: each would be a request that computes."""
    if not config.api_key:
        raise UsageError(
            f"LiteLLM does not start without a key that clients must send: name a file with one as api_key_file in "
            f"{config.path}, such as `echo sk-$(openssl rand -hex 32) > key`; members may ask for the same."
        )
    deployments = [
        {
            "model_name": model,
            # A hosted vLLM is what LiteLLM calls a server with vLLM's fields, which are ours.
            "litellm_params": {
                "model": f"hosted_vllm/{model}",
                "api_base": f"{url}/v1",
                "api_key": f"os.environ/{_KEY}",
            },
            "model_info": {"id": f"member-{number}"},
        }
        for number, url in enumerate(urls)
    ]
    routing: dict[str, object] = {
        "routing_strategy": "least-busy" if config.policy == "least-busy" else "simple-shuffle",
        "num_retries": 2 * len(urls) + 2,
        "allowed_fails": 0,
        "cooldown_time": 2,
        "retry_after": 0,
        "enable_pre_call_checks": True,
    }
    calls: dict[str, object] = {"drop_params": False, "request_timeout": 7200, "telemetry": False}
    files = {}
    if config.policy == "cache_lookup":
        calls["callbacks"] = f"{PLUGIN}.affinity"
        files[f"{PLUGIN}.py"] = (Path(__file__).parent / f"{PLUGIN}.py").read_text(encoding="utf-8")
    if config.policy == "session_affinity":
        routing["optional_pre_call_checks"] = ["session_affinity"]
    settings = {
        "model_list": deployments,
        "router_settings": routing,
        "litellm_settings": calls,
        "general_settings": {"background_health_checks": False},
    }
    files["litellm.yaml"] = json.dumps(settings, indent=1)  # JSON is YAML
    command = [*find_router(config), "--config", str(directory / "litellm.yaml")]
    command += ["--host", config.host, "--port", str(config.port), *config.router_options]
    # Its list of prices would come from the network at every start.
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": os.environ.get("LITELLM_LOG", "WARNING")}
    environment |= {_KEY: config.api_key, "LITELLM_MASTER_KEY": config.api_key}
    return RouterLaunch(command, environment, files, "/health/liveliness")
