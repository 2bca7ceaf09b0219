"""Runs in vLLM's own environment: the flags of `vllm serve`, as JSON."""

import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = sorted({name for action in parser._actions for name in action.option_strings})
    sys.stdout.write("RESULT " + json.dumps(flags) + "\n")


if __name__ == "__main__":
    main()
