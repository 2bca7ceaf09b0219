"""A model that agents can work with: it calls one tool, reads the result and says so. The engine around it is real."""

from contextlib import contextmanager
from pathlib import Path

from onebox.engine.api import Engine, EngineConfig
from onebox.server.app import create_app
from onebox.server.service import Service
from onebox.text.chat import ChatTemplate
from onebox.text.generation import GenerationDefaults
from onebox.text.tokenizer import Tokenizer
from onebox.text.vocabulary import token_table
from tests.engine.scripted import ScriptedRunner
from tests.server.conftest import listening

POCKET = Path(__file__).parents[2] / "onebox" / "pocket" / "model"
PAGE_TOKENS = 64


def tool_call(name, **arguments):
    """The text with which this model family calls a tool."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


class AgentRunner(ScriptedRunner):
    """Says `call` to a prompt with tools and `answer` to one with a tool's result or without tools.

    `prompts` are the texts that it read, in order.
    """

    vocab_size = 8192

    def __init__(self, tokenizer, call, answer):
        super().__init__()
        self.prompts = []
        self._tokenizer = tokenizer
        self._texts = {"call": call, "answer": answer}
        self._read = {}
        self._scripts = {}

    def _chunk(self, chunk):
        self._read.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        if chunk.draw:
            prompt = b"".join(map(self._tokenizer.shown_bytes, self._read.pop(chunk.request_id))).decode()
            self.prompts.append(prompt)
            has_tools = "<tools>" in prompt
            last = prompt.rpartition("<|im_start|>user\n")[2]
            text = self._texts["call" if has_tools and not last.startswith("<tool_response>") else "answer"]
            thinks = prompt.endswith("<think>\n")
            text = f"A thought.\n</think>\n\n{text}" if thinks else text
            self._scripts[chunk.request_id] = self._tokenizer.encode(text + "<|im_end|>")
        return super()._chunk(chunk)

    def _next(self, request_id):
        self.script = self._scripts[request_id]
        return super()._next(request_id)


@contextmanager
def agent_server(call, answer, settings=None):
    """(runner, URL) of a server whose model makes that call."""
    tokenizer, defaults = Tokenizer.load(POCKET), GenerationDefaults.load(POCKET)
    runner = AgentRunner(tokenizer, call, answer)
    limits = EngineConfig(max_model_len=65536, num_pages=8 * 65536 // PAGE_TOKENS, eos_token_ids=defaults.eos_token_ids)
    with Engine(runner, limits, token_table(tokenizer, defaults.eos_token_ids)) as engine:
        service = Service(
            engine, tokenizer, ChatTemplate.load(POCKET), defaults, "pocket", aliases=("claude-*", "gpt-*")
        )
        with listening(create_app(service, settings)) as url:
            yield runner, url
