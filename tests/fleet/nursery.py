"""Servers for the tests of the fleet, started in milliseconds.

One process imports and loads everything once, and forks a real server of the tiny random model for each that asks over
its socket.

As a program (`nursery.py SOCKET OPTIONS`) it is such an asker, for the fleet's start lines: it lives as long as its
server, passes SIGTERM on to it, and its end ends the server.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class MemberOptions:
    port: int
    version: str = "1.0"
    context: int = 2000
    step_s: float = 0.0
    """A step of the engine takes so much longer."""
    seed: int = 0
    """Of the weights: members with another seed answer otherwise, and hide it if `fingerprint` is equal."""
    fingerprint: str = "same"


def ask(path, options):
    """(process id of a new server, the connection that keeps it)."""
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(path)
    asking.sendall(json.dumps(options).encode() + b"\n")
    return int(asking.makefile().readline()), asking


def listen(path, directories):
    """Loads the models in `directories`, one for each seed, and forks for ever."""
    import torch

    torch.set_num_threads(1)
    models = [load(directory) for directory in directories]
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asking, _ = listening.accept()
        options = MemberOptions(**json.loads(asking.makefile().readline()))
        child = os.fork()
        if child == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(models[options.seed], options, asking)
            os._exit(0)
        asking.sendall(f"{child}\n".encode())
        asking.close()


def load(directory):
    from onebox.engine.api import EngineOptions, TokenInfo
    from onebox.engine.plan import plan_engine
    from onebox.engine.start import warm_runner
    from onebox.text.chat import ChatTemplate
    from onebox.text.generation import GenerationDefaults
    from onebox.text.tokenizer import Tokenizer
    from onebox.text.vocabulary import token_table

    tokenizer, defaults = Tokenizer.load(directory), GenerationDefaults.load(directory)
    tokens = TokenInfo(
        defaults.eos_token_ids, tokenizer.message_token_ids, token_table(tokenizer, defaults.eos_token_ids)
    )
    options = EngineOptions(kv_cache_memory_bytes=16 << 20, max_model_len=2000, max_num_seqs=4, device="cpu")
    plan = plan_engine(directory, options, tokens)
    import onebox.server.app
    import onebox.server.run  # noqa: F401 - before the forks

    return warm_runner(plan), plan, tokens, tokenizer, ChatTemplate.load(directory), defaults


class SlowRunner:
    """The runner of a model, with time added to each step."""

    def __init__(self, runner, step_s):
        self._runner, self._step_s = runner, step_s

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def start(self, plan):
        time.sleep(self._step_s)
        return self._runner.start(plan)


def serve(model, options, asking):
    """Serves until SIGTERM, or until who asked for it is gone."""
    from dataclasses import replace

    from onebox.engine.engine import Engine
    from onebox.server.app import create_app
    from onebox.server.endpoints import models
    from onebox.server.run import bind, run
    from onebox.server.service import Service

    def watch():
        asking.recv(1)
        os._exit(9)

    threading.Thread(target=watch, daemon=True).start()
    runner, plan, tokens, tokenizer, template, defaults = model
    models.__version__ = options.version
    config = replace(plan.config, max_model_len=options.context)
    engine = Engine(SlowRunner(runner, options.step_s), config, tokens.table)
    service = Service(engine, tokenizer, template, defaults, "tiny", fingerprint=options.fingerprint)
    status = run(create_app(service), bind("127.0.0.1", options.port), lambda: None, engine.close, drain_s=60)
    os._exit(status)


def main():
    path, given = sys.argv[1:3]
    if path == "listen":
        from pathlib import Path

        listen(given, [Path(name) for name in sys.argv[3:]])
    child, asking = ask(path, json.loads(given))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:  # a signal's handler runs between two reads
        asking.settimeout(0.2)
        try:
            asking.recv(1)
            return
        except TimeoutError:
            continue


if __name__ == "__main__":
    main()
