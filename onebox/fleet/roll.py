"""A rolling update: the members of the fleet's own are replaced one after the other, and no request is lost.

Beside the old one: the new server boots on another port, must be of the fleet's model and context, must give the old
one's answers to fixed prompts, then takes the traffic, and the old one is drained and stopped. In place, for boxes
whose memory holds one server only: the old one is drained and stopped first, and started again if the new one is
refused.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx

from onebox.fleet.config import FleetConfig, MemberConfig
from onebox.fleet.member import Identity, read_identity
from onebox.fleet.process import OwnedProcess
from onebox.fleet.smoke import SMOKE_PROMPTS, ask_smoke, refuse_other_answers
from onebox.fleet.watch import FleetMember, MemberState
from onebox.spec.errors import OneboxError, UsageError

if TYPE_CHECKING:
    from onebox.fleet.fleet import Fleet

__all__ = ["Roll"]

_STOP_S = 30.0
"""For a server without requests to end."""


class Roll:
    """One roll, from its start to its end; `lines` tell how far it is."""

    def __init__(self, fleet: "Fleet", config: FleetConfig, names: list[str], *, in_place: bool) -> None:
        self._fleet = fleet
        self._config = config
        self._in_place = in_place
        chosen = [fleet.member(name) for name in names] if names else fleet.members
        self._members = [member for member in chosen if config.member(member.config.name).is_owned]
        if not self._members:
            raise UsageError(f"No member has a start in {config.path}: a fleet replaces only what it starts itself.")
        self.lines: list[str] = []
        self.error = ""
        self.is_done = False

    async def run(self) -> None:
        """Ends at the first member whose replacement is refused; that one and the rest stay as they are."""
        try:
            for member in self._members:
                await (self._replace_in_place if self._in_place else self._replace_beside)(member)
            self._settle()
            self._say(f"Done: {', '.join(member.config.name for member in self._members)}.")
        except (OneboxError, httpx.HTTPError) as error:
            self.error = str(error) or type(error).__name__
            self._say(self.error)
        finally:
            self.is_done = True

    def status(self) -> dict[str, Any]:
        return {"is_done": self.is_done, "error": self.error, "lines": self.lines}

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self._fleet.say(line)

    async def _replace_beside(self, member: FleetMember) -> None:
        config = self._new_config(member)
        name = config.name
        answers = await self._old_answers(member)
        url, process = self._fleet.start_process(config, elsewhere=True)
        try:
            identity = await self._accept(name, url, process, answers)
        except (OneboxError, httpx.HTTPError):
            await process.stop(_STOP_S)
            raise
        old_url, old = member.url, member.process  # now: it may have been started again meanwhile
        member.config = config
        member.move(url, process, identity)
        self._say(f"{name}: {identity.version} at {url} takes the traffic; the old one drains")
        await self._drain(member, old_url)
        if old:
            await old.stop(_STOP_S)
        self._say(f"{name}: replaced")

    async def _replace_in_place(self, member: FleetMember) -> None:
        config, old_config, url = self._new_config(member), member.config, member.url
        name = config.name
        answers = await self._old_answers(member)
        member.is_replaced, was_drained = True, member.is_drained
        member.drain()
        self._say(f"{name}: drains; the others take its traffic")
        try:
            await self._drain(member, url)
            if member.process:
                await member.process.stop(_STOP_S)
            place = replace(config, url=url)
            _, process = self._fleet.start_process(place)
            member.process = process
            try:
                identity = await self._accept(name, url, process, answers)
            except (OneboxError, httpx.HTTPError):
                await process.stop(_STOP_S)
                self._say(f"{name}: the old one is started again")
                _, member.process = self._fleet.start_process(replace(old_config, url=url))
                await self._fleet.wait_healthy(url, member.process)
                raise
            member.config = config
            member.move(url, process, identity)
        finally:
            member.is_replaced = False
            if not was_drained:
                member.resume()
        self._say(f"{name}: replaced by {identity.version}")

    def _new_config(self, member: FleetMember) -> MemberConfig:
        return self._config.member(member.config.name)

    async def _old_answers(self, member: FleetMember) -> list[Any]:
        """Of the server that is replaced; where that is down, of another member, since all answer alike."""
        others = [each for each in self._fleet.members if each.state is MemberState.UP]
        asked = member if member in others or not others else others[0]
        return await ask_smoke(self._fleet.http, asked.url)

    async def _accept(self, name: str, url: str, process: OwnedProcess, answers: list[Any]) -> Identity:
        """The new server's identity, once it has passed; it may be of another version and nothing else."""
        await self._fleet.wait_healthy(url, process)
        identity = await read_identity(self._fleet.http, url)
        self._fleet.refuse_other_model(name, identity)
        self._say(f"{name}: {identity.version} is up at {url}; asking {len(SMOKE_PROMPTS)} fixed prompts")
        refuse_other_answers(name, answers, await ask_smoke(self._fleet.http, url))
        self._fleet.wanted.add(identity)
        return identity

    async def _drain(self, member: FleetMember, url: str) -> None:
        """Lets the old server finish what it has; what is left at the end of the time is ended with an error."""
        if not await member.relay.wait_empty(url, self._fleet.config.drain_s):
            member.relay.cut(f"{member.config.name} was replaced and its time to finish is up.", url)
            await member.relay.wait_empty(url, _STOP_S)

    def _settle(self) -> None:
        """With all members replaced, only what they are now is wanted."""
        members = self._fleet.members
        if all(member.config.is_owned for member in members):
            now = {member.identity for member in members if member.identity}
            self._fleet.wanted.intersection_update(now)
