"""Runs in vLLM's own environment: the methods of --speculative-config, as JSON."""

import json
import sys
from typing import get_args

from vllm.config.speculative import MTPModelTypes, SpeculativeMethod


def main() -> None:
    # Of the families' own names for MTP one stays.
    methods = set(get_args(SpeculativeMethod)) - set(get_args(MTPModelTypes)) | {"mtp"}
    sys.stdout.write("RESULT " + json.dumps(sorted(methods)) + "\n")


if __name__ == "__main__":
    main()
