"""vLLM's side of gpu_generate.py, in its own environment. argv: model-directory workload.json.

Prints one JSON line per workload.

Knobs: bfloat16, CUDA graphs (default), max_num_seqs 512 so that all sequences run at once,
log-probs of the sampled tokens on (a trainer needs them), detokenisation off,
max_num_batched_tokens 16384.
"""

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams

path = sys.argv[1]
workload = json.loads(Path(sys.argv[2]).read_text())
llm = LLM(
    path,
    dtype="bfloat16",
    gpu_memory_utilization=0.6,
    max_model_len=2048,
    max_num_seqs=512,
    max_num_batched_tokens=16384,
    seed=0,
)


def go(limits):
    requests = [
        {"prompt_token_ids": prompt}
        for prompt, group in zip(workload["prompts"], limits, strict=True)
        for _ in group
    ]
    params = [
        SamplingParams(
            max_tokens=n,
            min_tokens=n,
            ignore_eos=True,
            temperature=1.0,
            logprobs=0,
            detokenize=False,
        )
        for group in limits
        for n in group
    ]
    start = time.perf_counter()
    llm.generate(requests, params, use_tqdm=False)
    return time.perf_counter() - start


go([[8] * len(group) for group in workload["limits"]["fixed"]])
for name, limits in workload["limits"].items():
    seconds = go(limits)
    tokens = sum(map(sum, limits))
    print(
        json.dumps(
            {
                "peer": "vllm",
                "lengths": name,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
        ),
        flush=True,
    )
