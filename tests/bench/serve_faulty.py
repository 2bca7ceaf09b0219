"""The server of `faulty.py` as a program, on a given port, until Ctrl-C."""

import sys
import time

from tests.bench.faulty import Behaviour, FaultyServer

if __name__ == "__main__":
    server = FaultyServer(Behaviour(), port=int(sys.argv[1]))
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        server.close()
