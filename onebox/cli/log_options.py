"""The options of `onebox serve` about what is logged."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.cli.options import option_group
from onebox.spec.log import LogStyle

if TYPE_CHECKING:
    from onebox.server.settings import ServerSettings

__all__ = ["LogOptions"]


@option_group("Logs")
class LogOptions:
    """What is written to stdout and stderr."""

    log_level: Annotated[
        str, typer.Option(help="The least that is logged: debug, info, warning or error; a request's line is info.")
    ] = "info"
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text"
    disable_log_requests: Annotated[
        bool,
        typer.Option(
            "--disable-log-requests",
            help="No line for each request; it has its id, key name, tokens, times and status, and no texts.",
        ),
    ] = False
    max_log_len: Annotated[
        int,
        typer.Option(min=0, max=10_000, help="Characters of each prompt and answer in a request's line; 0 is none."),
    ] = 0

    def style(self) -> LogStyle:
        return LogStyle(self.log_format, self.log_level)

    def applied_to(self, settings: "ServerSettings") -> "ServerSettings":
        return replace(settings, logs_requests=not self.disable_log_requests, max_logged_characters=self.max_log_len)
