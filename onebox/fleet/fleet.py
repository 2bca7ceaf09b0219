"""The fleet: its members, their relays, the router in front, and what is done to them while they serve."""

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn

from onebox.fleet.config import FleetConfig, MemberConfig
from onebox.fleet.member import Identity, differences, read_identity, refuse_differences, refuse_open
from onebox.fleet.page import admin_app
from onebox.fleet.process import KILL_S, OwnedProcess, free_ports
from onebox.fleet.relay import Relay, RelayPorts
from onebox.fleet.roll import Roll
from onebox.fleet.router import router_launch
from onebox.fleet.watch import FleetMember
from onebox.spec.authorization import authorization
from onebox.spec.errors import OneboxError

__all__ = ["Fleet", "open_fleet"]

Say = Callable[[str], None]
_ROUTER_S = 120.0
"""Until a router takes requests; LiteLLM imports for a while."""
_ROUTER_STOP_S = 5.0
_CUT_S = 1.0
"""For a last event to leave."""


class _Server(uvicorn.Server):
    """Leaves signals to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Fleet:
    """A running fleet; `open_fleet` makes one."""

    def __init__(self, config: FleetConfig, http: httpx.AsyncClient, relay_http: httpx.AsyncClient, say: Say) -> None:
        self.config = config
        self.http = http
        """For the fleet's own requests, which may be cancelled at any moment."""
        self.relay_http = relay_http
        self.say = say
        self.directory = Path(tempfile.mkdtemp(prefix="onebox-fleet-"))
        """Logs of the fleet's own processes, and the router's configuration; removed in the end."""
        self.keeps_logs = False
        self.wanted: set[Identity] = set()
        self.members: list[FleetMember] = []
        self.router: OwnedProcess | None = None
        self.num_router_restarts = 0
        self.roll: Roll | None = None
        self._processes: list[OwnedProcess] = []
        """Members of its own, also those that are being replaced."""
        self._tasks: list[asyncio.Task[None]] = []
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._relay_ports: list[int] = []

    # The start.

    async def start(self) -> None:
        """Members, check, relays, router; each step refuses what is wrong with a sentence."""
        self._refuse_early()
        urls = await self._start_members()
        identities = await self._identities(urls)
        if not identities:
            raise OneboxError(f"No member of {self.config.path} answers: {', '.join(urls.values())}.")
        refuse_differences(identities)
        if self.config.needs_keys:
            for name in identities:
                await refuse_open(self.http, name, urls[name])
        self.wanted.add(next(iter(identities.values())))
        for member in self.members:
            member.identity = identities.get(member.config.name)
            await member.look()
        await self._listen()
        await self._start_router()
        self._tasks = [asyncio.create_task(member.watch()) for member in self.members]
        self._tasks.append(asyncio.create_task(self._watch_router()))

    def _refuse_early(self) -> None:
        """What would be refused only after minutes, when the members have started: ports, and the router itself."""
        router_launch(self.config, (), "", self.directory, 0)
        _bound(self.config.host, self.config.port).close()
        _bound("127.0.0.1", self.config.admin_port).close()

    async def _start_members(self) -> dict[str, str]:
        """Starts what is the fleet's own, all at once; returns the URLs by name."""
        for config in self.config.members:
            url, process = self.start_process(config) if config.is_owned else (config.url or "", None)
            relay = Relay(config.name, self.relay_http, url)
            member = FleetMember(config, self.config, self.http, relay, self.wanted, self.run, process)
            self.members.append(member)
        owned = [member for member in self.members if member.process]
        await asyncio.gather(*(self.wait_healthy(m.url, m.process) for m in owned if m.process))
        return {member.config.name: member.url for member in self.members}

    def start_process(self, config: MemberConfig, *, elsewhere: bool = False) -> tuple[str, OwnedProcess]:
        """(URL, process) of a member of the fleet's own; `elsewhere`: on another port than its URL names."""
        given = urlsplit(config.url or "http://127.0.0.1")
        port = (None if elsewhere else given.port) or free_ports(1)[0]
        process = self.run(config, port)
        self.say(f"{config.name}: starting on port {port}, log in {process.log}")
        return f"{given.scheme}://{given.hostname}:{port}", process

    def run(self, config: MemberConfig, port: int) -> OwnedProcess:
        """A server of the fleet's own, which ends with the fleet."""
        process = OwnedProcess(config.name, config.command(port), self.directory / f"{config.name}-{port}.log")
        self._processes = [*(each for each in self._processes if each.status is None), process]
        return process

    async def wait_healthy(self, url: str, process: OwnedProcess) -> None:
        """Until the process takes requests; refuses one that ends before, or that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.start_s):
                while True:
                    if process.status is not None:
                        raise OneboxError(process.why())
                    with contextlib.suppress(httpx.HTTPError):
                        if (await self.http.get(f"{url}/health", timeout=5)).status_code == 200:
                            return
                    await asyncio.sleep(0.1)
        raise OneboxError(f"{process.name} is not healthy after {self.config.start_s:g} s; see {process.log}.")

    async def _identities(self, urls: dict[str, str]) -> dict[str, Identity]:
        """Of the members that answer; the others join when they do."""
        asked = await asyncio.gather(*(read_identity(self.http, url) for url in urls.values()), return_exceptions=True)
        found: dict[str, Identity] = {}
        for name, answer in zip(urls, asked, strict=True):
            if isinstance(answer, Identity):
                found[name] = answer
            elif isinstance(answer, OneboxError):
                self.say(f"{name}: {answer} It joins when it answers.")
            else:
                raise answer
        return found

    async def _listen(self) -> None:
        """Relays on ports of this machine, and the page with its API on the admin port."""
        sockets = [_bound("127.0.0.1", 0) for _ in self.members]
        self._relay_ports = [each.getsockname()[1] for each in sockets]
        apps: dict[int, Any] = dict(zip(self._relay_ports, (member.relay for member in self.members), strict=True))
        sockets.append(_bound("127.0.0.1", self.config.admin_port))
        apps[self.config.admin_port] = admin_app(self)
        options: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False, "ws": "none"}
        # The router keeps idle connections; who closes first must not be us.
        server = _Server(uvicorn.Config(RelayPorts(apps), timeout_keep_alive=3600, log_level="critical", **options))
        self._server = server
        self._serving = asyncio.create_task(server.serve(sockets=sockets))
        while not server.started:
            await asyncio.sleep(0.01)

    @property
    def relay_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._relay_ports]

    async def _start_router(self) -> None:
        config = self.config
        (model,) = {identity.model for identity in self.wanted}
        launch = router_launch(config, self.relay_urls, model, self.directory, free_ports(1)[0])
        for name, text in launch.files.items():
            (self.directory / name).write_text(text, encoding="utf-8")
        _bound(config.host, config.port).close()
        router = OwnedProcess(config.router, launch.command, self.directory / "router.log", launch.environment)
        self.router = router
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ROUTER_S):
                while router.status is None:
                    with contextlib.suppress(httpx.HTTPError):
                        response = await self.http.get(f"{config.url}{launch.ready_path}", timeout=5)
                        if response.status_code == 200:
                            return
                    await asyncio.sleep(0.1)
        if router.status is not None:
            raise OneboxError(router.why())
        raise OneboxError(f"{config.router} is not ready after {_ROUTER_S:g} s; see {router.log}.")

    async def _watch_router(self) -> None:
        """The router is the fleet's own: it is started again when it ends."""
        while True:
            await asyncio.sleep(self.config.poll_s)
            if self.router and self.router.status is not None:
                self.say(f"{self.router.why()}; it is started again.")
                self.num_router_restarts += 1
                try:
                    await self._start_router()
                except OneboxError as error:
                    self.say(str(error))
                    await asyncio.sleep(5)

    # While it runs.

    def member(self, name: str) -> FleetMember:
        self.config.member(name)
        return next(member for member in self.members if member.config.name == name)

    def begin_roll(self, config: FleetConfig, names: list[str], *, in_place: bool) -> Roll:
        """Starts to replace members, one after the other, by what `config` says; refuses while one is under way."""
        if self.roll and not self.roll.is_done:
            raise OneboxError("A roll is under way; wait until it has ended.")
        self.roll = Roll(self, config, names, in_place=in_place)
        self._tasks.append(asyncio.create_task(self.roll.run()))
        return self.roll

    def refuse_other_model(self, name: str, identity: Identity) -> None:
        """A replacement may be of another version, and in nothing else another."""
        if wrong := differences(identity, next(iter(self.wanted)), with_version=False):
            raise OneboxError(f"The new {name} is not like the fleet: {'; '.join(wrong)}. It takes no traffic.")

    def status(self) -> dict[str, Any]:
        """For the table, the page and scripts."""
        router = self.router
        return {
            "router": {
                "name": self.config.router,
                "policy": self.config.policy,
                "url": self.config.url,
                "is_running": bool(router and router.status is None),
                "num_restarts": self.num_router_restarts,
            },
            "model": sorted({identity.model for identity in self.wanted}),
            "members": [
                member.status() | {"relay_url": url} for member, url in zip(self.members, self.relay_urls, strict=True)
            ],
            "roll": self.roll.status() if self.roll else None,
        }

    # The end.

    async def stop(self) -> None:
        """Ends what the fleet has started, in order; cancelled meanwhile, at once. Other members are left alone."""
        try:
            await self._stop_in_order()
        except asyncio.CancelledError:
            await self._stop_at_once()
            raise
        finally:
            if not self.keeps_logs:
                shutil.rmtree(self.directory, ignore_errors=True)

    async def _stop_in_order(self) -> None:
        """The router first, so that nothing new comes; then the fleet's own members."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.router:
            await self._drain_relays()
            await self.router.stop(_ROUTER_STOP_S)
        await asyncio.gather(*(process.stop(self.config.drain_s) for process in self._processes))
        if self._server and self._serving:
            self._server.should_exit = True
            await self._serving

    async def _stop_at_once(self) -> None:
        started = [*self._processes, *([self.router] if self.router else [])]
        try:
            await self._cut_relays("the fleet was ended.")
            if self.router:
                await self.router.stop(_ROUTER_STOP_S)  # passes on what it has
        finally:
            for process in started:
                process.kill()
        await asyncio.gather(*(process.wait(KILL_S) for process in started))
        if self._server and self._serving:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _drain_relays(self) -> None:
        """Lets what is open finish; what comes is refused."""
        relays = [member.relay for member in self.members]
        for relay in relays:
            relay.closed_reason = "the fleet is stopping."
        drained = [relay.wait_empty(url, self.config.drain_s) for relay in relays for url in relay.open_urls()]
        await asyncio.gather(*drained)
        await self._cut_relays("the fleet has stopped, and the time to finish is up.")

    async def _cut_relays(self, reason: str) -> None:
        """Ends what is open with an error, while there is a router to pass it on."""
        for relay in (member.relay for member in self.members):
            for url in relay.open_urls():
                relay.cut(f"{relay.name} does not go on: {reason}", url)
                await relay.wait_empty(url, _CUT_S)


def _bound(host: str, port: int) -> socket.socket:
    """A socket that is bound; a port in use is refused with a sentence."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: asyncio then sets TCP_NODELAY
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OneboxError(f"Port {port} on {host} cannot be had ({error.strerror}); choose another.") from None
    return bound


def _limits(num_kept: int | None) -> httpx.Limits:
    """Any number of connections; None: of those that are kept, too."""
    return httpx.Limits(max_connections=None, max_keepalive_connections=num_kept)


class _WholeRequests(httpx.AsyncHTTPTransport):
    """Requests go on when their caller is cancelled, and their responses are closed then.

    A connection whose request is cancelled in the very turn in which it is made is closed by nobody (anyio 4).
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        task = asyncio.create_task(super().handle_async_request(request))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            _left.add(closing := asyncio.create_task(_close(task)))
            closing.add_done_callback(_left.discard)
            raise


_left = set[asyncio.Task[None]]()
"""A loop holds its tasks weakly."""


async def _close(task: asyncio.Task[httpx.Response]) -> None:
    with contextlib.suppress(Exception, asyncio.CancelledError):
        await (await task).aclose()


@contextlib.asynccontextmanager
async def open_fleet(config: FleetConfig, say: Say) -> AsyncIterator[Fleet]:
    """A fleet that serves; at the end of the block everything that it started has ended."""
    headers = authorization(config.api_key)
    # Connections are not kept: a request first closes those that are too old, and httpcore 1.0 leaves them open if the
    # request is cancelled just then. Relays cancel none before its connection is there.
    transport = _WholeRequests(limits=_limits(num_kept=0), trust_env=False)
    own = httpx.AsyncClient(headers=headers, transport=transport, trust_env=False)
    # Relays send the client's own headers, without these.
    async with own, httpx.AsyncClient(limits=_limits(num_kept=None), trust_env=False) as relay_http:
        fleet = Fleet(config, own, relay_http, say)
        try:
            await fleet.start()
            yield fleet
        except OneboxError as error:
            fleet.keeps_logs = str(fleet.directory) in str(error)
            raise
        finally:
            await fleet.stop()
