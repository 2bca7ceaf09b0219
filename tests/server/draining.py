"""Serves an application without an engine through `run`, for tests that stop it: arguments are the seconds to drain.

POST /count streams numbers, three of them unless asked for more; what it would go on with ends when all is stopped.
POST /read reads its body.
"""

import asyncio
import sys
import threading

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from onebox.server.run import bind, run
from onebox.spec.output import end_process, say

app = FastAPI()
stopped = threading.Event()


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
    with bind("127.0.0.1", 0) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        status = run(app, bound, lambda: say(url), stopped.set, drain_s=float(sys.argv[1]))
    say("Stopped.")
    end_process(status)


if __name__ == "__main__":
    main()
