"""Serves an application without an engine through `run`, for tests that stop it: arguments are the seconds to
drain, those until a server that does not end is ended, and those after which the watchdog takes it for frozen, or a
signal for unheard.

POST /count streams numbers, three of them unless asked for more; what it would go on with ends when all is stopped.
POST /flood streams without end. Others hang in a thread or in the event loop, or report that nothing can be served any
more.
POST /read reads its body. POST /hold holds Python's lock for hours.
"""

import asyncio
import re
import sys
import threading
import time

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from onebox.server import run as running
from onebox.spec.output import end_process, say

app = FastAPI()
stopped = threading.Event()
failed = threading.Event()


@app.post("/count")
async def count(limit: int = 3):
    async def numbers():
        for number in range(limit):
            yield f"{number}\n"
            if stopped.is_set():
                yield "stopped\n"
                return
            await asyncio.sleep(0.1)
        yield "done\n"

    return StreamingResponse(numbers())


@app.post("/wait-in-thread")
async def wait_in_thread():
    await asyncio.to_thread(time.sleep, 3600)


@app.post("/flood")
async def flood():
    async def blocks():
        while True:
            yield b"x" * 65536

    return StreamingResponse(blocks())


@app.post("/wait-in-loop")
async def wait_in_loop():
    time.sleep(3600)


@app.post("/hold")
def hold():
    # On a thread, as work of clients is.
    re.match(r"(a+)+$", "a" * 64 + "b")


@app.post("/fail")
async def fail():
    failed.set()


@app.post("/read")
async def read(request: Request):
    return {"length": len(await request.body())}


@app.get("/health")
async def health():
    return {"status": "ok"}


@app.get("/version")
async def version():
    return {}


def main():
    running.ENDING_S = float(sys.argv[2])
    with running.bind("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        drain_s = float(sys.argv[1])
        freeze_s, unheard_s = map(float, sys.argv[3:])
        status = running.run(
            app,
            bound,
            lambda: say(url),
            stopped.set,
            drain_s,
            lambda: failed.wait() and "Lost.",
            freeze_s=freeze_s,
            unheard_s=unheard_s,
        )
    say("Stopped.")
    end_process(status)


if __name__ == "__main__":
    main()
