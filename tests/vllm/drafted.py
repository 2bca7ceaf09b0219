"""Runs in vLLM's own environment: greedy tokens after a prompt, with that many MTP drafts, as JSON."""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    drafts = int(sys.argv[3])
    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        language_model_only=True,
        distributed_executor_backend="uni",
        max_model_len=128,
        enforce_eager=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
    )
    params = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    result = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], params)[0]
    sys.stdout.write("RESULT " + json.dumps(list(result.outputs[0].token_ids)) + "\n")


if __name__ == "__main__":
    main()
