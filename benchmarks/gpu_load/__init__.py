"""Mixed load on the whole engine on a GPU, from a cold start: what waits, and what memory grows.

    python -m benchmarks.gpu_load [--shape qwen3.5-122b-a10b] [--seconds 600] [--clients 12]

Starts an engine in a process of its own as `onebox serve` does (plan, kernels, weights, graphs, warm-up) with random
weights, then lets clients of this process send prompts of 10 to 20,000 tokens (log-uniform) with answers of 16 to 300,
a fifth of them aborted, and a tenth with log-probabilities or penalties. Prints JSON: the phases of the start; then
device memory when ready and at its highest afterwards, kernels that Triton was asked for after that, the waits between
tokens, what waited without need, and the median step of one stream alone.

A step's work is known from its like: steps are grouped by their prompt tokens, context and rows, and a step is late if
it took 50 ms longer than the slowest tenth of its group. Time between two steps while requests run is a wait, too.
"""
