"""Runs in vLLM's own environment: opens a checkpoint with stock vLLM and prints a prompt's logprobs as JSON."""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        language_model_only=True,
        distributed_executor_backend="uni",
        max_model_len=128,
        enforce_eager=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
    )
    prompt = json.loads(sys.argv[2])
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    result = llm.generate([{"prompt_token_ids": prompt}], params)[0]
    values = [next(iter(entry.values())).logprob for entry in result.prompt_logprobs if entry]
    sys.stdout.write("RESULT " + json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
