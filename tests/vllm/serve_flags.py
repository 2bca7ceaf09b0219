"""Runs in vLLM's own environment: the flags of `vllm serve` as JSON, each with what it takes."""

import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = {name: takes(action.nargs) for action in parser._actions for name in action.option_strings}
    sys.stdout.write("RESULT " + json.dumps(flags, sort_keys=True) + "\n")


def takes(nargs: str | int | None) -> str:
    return {0: "switch", "+": "list"}.get(nargs, "value")


if __name__ == "__main__":
    main()
