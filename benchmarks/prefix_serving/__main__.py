"""A server with prefixes on disk is stopped or killed, and asked again (`-m benchmarks.prefix_serving restart`)."""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.prefix_serving.serving import Completion, Server, prompt_of
from benchmarks.prefix_store.kill import leftovers

KILL_SHAPE = ("--max-model-len", "4096", "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "4")
NUM_DOCUMENTS = 6
DOCUMENT_TOKENS = 1500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["restart", "kill"])
    parser.add_argument("--tokens", type=int, default=30_000, help="of the conversation that is asked again")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "prefixes"
        result = (
            measure_restart(directory, options.tokens)
            if options.what == "restart"
            else kill_often(directory, options.kills, options.seed)
        )
    print(json.dumps(result))
    return 0


def measure_restart(directory: Path, num_tokens: int) -> dict[str, object]:
    """First token of a long prompt: cold, from memory, and from disk after a restart. Same bits every time."""
    shape = ("--max-model-len", str(num_tokens + 1024), "--prefix-dir", str(directory))
    prompt = prompt_of(0, num_tokens)
    with Server(*shape) as server:
        server.complete(prompt_of(1, 600))  # what is done once is done
        cold, warm = server.complete(prompt), server.complete(prompt)
        stop_s = server.terminate()
    with Server(*shape) as server:
        restarted = server.complete(prompt)
        next_question = server.complete([*prompt[:-100], *prompt_of(2, 100)])
    _require(_is_same(cold, warm) and _is_same(cold, restarted), "An answer changed.")
    _require(restarted.cached_tokens > num_tokens - 64, f"Only {restarted.cached_tokens} tokens came from disk.")
    return {
        "tokens": num_tokens,
        "cold_s": round(cold.first_token_s, 3),
        "memory_s": round(warm.first_token_s, 3),
        "after_restart_s": round(restarted.first_token_s, 3),
        "other_question_s": round(next_question.first_token_s, 3),
        "other_question_cached_tokens": next_question.cached_tokens,
        "stop_s": round(stop_s, 3),
        "disk_bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
    }


def kill_often(directory: Path, num_kills: int, seed: int) -> dict[str, object]:
    """Kills servers under load; every restart answers as one without a disk, and no file is left behind."""
    draw = random.Random(seed)
    with Server(*KILL_SHAPE) as server:
        expected = [server.complete(_question(place)) for place in range(NUM_DOCUMENTS)]
    shape = (*KILL_SHAPE, "--prefix-dir", str(directory))
    num_cached = num_left = 0
    for place in range(num_kills):
        with Server(*shape) as server:
            num_left += len(leftovers(directory)) if directory.exists() else 0
            for document in draw.sample(range(NUM_DOCUMENTS), 2):
                answer = server.complete(_question(document))
                _require(_is_same(answer, expected[document]), f"Restart {place} answered document {document} wrongly.")
                num_cached += answer.cached_tokens > 0
            _load_until_killed(server, draw)
        print(f"kill {place + 1}: {sum(1 for _ in directory.glob('*/entries/*'))} entries", file=sys.stderr)
    with Server(*shape) as server:
        _require(_is_same(server.complete(_question(0)), expected[0]), "The last restart answered wrongly.")
        server.terminate()
    _require(not (left := leftovers(directory)), f"Files are left that nobody needs: {left}")
    _require(not num_left, f"{num_left} files were left after restarts.")
    return {"kills": num_kills, "answers_from_cache": num_cached, "answers": 2 * num_kills}


def _load_until_killed(server: Server, draw: random.Random) -> None:
    """Several clients ask for new prefixes; at a random moment the server is killed."""

    def ask(seed: int) -> None:
        with suppress(OSError):
            for number in range(100):
                server.complete([*prompt_of(seed + number, 700), *prompt_of(seed, 40)], max_tokens=2)

    clients = [threading.Thread(target=ask, args=(draw.randrange(10**6),)) for _ in range(3)]
    for client in clients:
        client.start()
    time.sleep(draw.uniform(0.05, 3.0))
    server.kill()
    for client in clients:
        client.join()


def _question(document: int) -> list[int]:
    return [*prompt_of(1000 + document, DOCUMENT_TOKENS), *prompt_of(document, 30)]


def _is_same(one: Completion, other: Completion) -> bool:
    return (one.text, one.logprobs) == (other.text, other.logprobs)


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise SystemExit(message)


if __name__ == "__main__":
    sys.exit(main())
