"""`onebox chat`: a conversation in the terminal, or one question from a script, with any OpenAI-compatible server."""

import contextlib
import sys
from typing import Annotated, Any

import typer

from onebox.cli.chat_answer import ChatAnswer
from onebox.cli.chat_input import is_terminal, read_message, read_pipe
from onebox.cli.chat_server import MALFORMED, ChatServer
from onebox.cli.printable import printable
from onebox.spec.errors import OneboxError, UnsupportedError, UsageError

__all__ = ["chat"]

_HELP = '''\
/bye            exit
/reset          clear the conversation
/system TEXT    set the system prompt; without TEXT, remove it
/think on|off   switch thinking on or off
/help           show this help
A message of several lines is pasted as it is, or typed between """ and """.
Ctrl-C stops an answer; at the prompt it exits, as Ctrl-D does.'''
_STOPPED = 130


def chat(
    question: Annotated[
        list[str] | None,
        typer.Argument(help="Ask this, print the answer and exit. What is piped in is added below it."),
    ] = None,
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="ONEBOX_API_KEY", help="The server's API key, if it needs one.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first listed.")] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="Let the model think before it answers, or not.")
    ] = None,
) -> None:
    """Chat with a model on a server, in the terminal.

    With a question, or with one from a file or a pipe, it is answered once. Where the output is no terminal, it is the
    answer alone: no thinking, no figures, no colours.
    """
    text = "\n\n".join(part for part in (" ".join(question or ()), read_pipe()) if part.strip())
    if not text and not is_terminal(sys.stdin):
        raise UsageError("There is nothing to ask: give a question, or pipe one in.")
    with ChatServer(url, api_key) as server:
        server.model = model or server.first_model()
        conversation = _Conversation(server, system, think)
        if text:
            _ask_once(conversation, text)
        else:
            typer.echo(f"{printable(server.model)} at {server.url}. /help shows the commands.")
            _talk(conversation)


def _ask_once(conversation: "_Conversation", text: str) -> None:
    answer = conversation.say(text)
    if answer.is_stopped:
        raise typer.Exit(_STOPPED)
    if answer.finish_reason == "length":
        typer.echo("onebox: The answer was cut at its length limit.", err=True)


def _talk(conversation: "_Conversation") -> None:
    """Reads messages and prints answers until the input ends. An error ends only the current answer."""
    while not conversation.is_over:
        try:
            conversation.take(read_message())
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        except OneboxError as error:
            typer.echo(f"onebox: {error}", err=True)


class _Conversation:
    """The messages so far, and how the next answer is requested."""

    def __init__(self, server: ChatServer, system: str = "", thinks: bool | None = None) -> None:
        self._server = server
        self._messages: list[dict[str, Any]] = []
        self._system = system
        self._thinks = thinks
        """None: the model's default; the field is not sent, because other servers may not accept it."""
        self.is_over = False

    def take(self, message: str) -> None:
        """Handles what was typed: a command, or a message to the model."""
        if message.startswith("/") and "\n" not in message:
            typer.echo(self._command(message))
        elif message:
            self.say(message)

    def _command(self, line: str) -> str:
        """Runs a command line that begins with a slash; returns the text to print."""
        name, _, text = line.partition(" ")
        text = text.strip()
        match name, text:
            case "/bye", "":
                self.is_over = True
                return "Bye."
            case "/reset", "":
                self._messages.clear()
                return "The conversation is cleared."
            case "/system", _:
                self._system = text
                return "The system prompt is set." if text else "There is no system prompt."
            case "/think", "on" | "off":
                self._thinks = text == "on"
                return f"Thinking is {text}."
            case "/help", "":
                return _HELP
        raise UsageError(f"{line!r} is not a command; /help shows the commands.")

    def say(self, text: str) -> ChatAnswer:
        """Sends the question, streams the answer and stores both; without an answer, the question is dropped too."""
        self._messages.append({"role": "user", "content": text})
        answer = ChatAnswer(is_plain=not is_terminal(sys.stdout))
        try:
            self._read(answer)
        finally:
            answer.end()
            if answer.is_empty:
                self._messages.pop()
            else:
                self._messages.append(answer.message())
        return answer

    def _read(self, answer: ChatAnswer) -> None:
        try:
            # Closed at once: a server keeps generating while the connection is open.
            with contextlib.closing(self._server.stream(self._body())) as chunks:
                for chunk in chunks:
                    answer.take(chunk)
            figures = answer.figures()
        except KeyboardInterrupt:
            answer.is_stopped = True
            answer.note("stopped")
        except MALFORMED:
            raise UnsupportedError(
                f"{self._server.url} streamed an event that is no chunk of a chat; is this an OpenAI-compatible server?"
            ) from None
        else:
            answer.note(figures)

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body: dict[str, Any] = {"messages": [*system, *self._messages]}
        if self._thinks is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._thinks}
        return body
