"""vLLM's side of gpu_generate.py, in its own environment.

argv: model-directory workloads.json rounds.

Prints one JSON line per round of a workload: its seconds and the lengths of its answers.

Knobs: bfloat16, CUDA graphs (default), random weights where the directory holds a configuration
only, max_num_seqs 512 so that all sequences may run at once, log-probs of the sampled tokens on (a
trainer needs them), no tokenizer, max_num_batched_tokens 16384, 85% of the memory. Qwen3.5 without
images is not in its table of models: vllm_text_hybrid.py makes it of vLLM's own classes. Prompts of
gated delta nets go through its Triton kernels, for flashinfer's are a package of their own.
"""

import json
import sys
import time
from pathlib import Path

from vllm import ModelRegistry

WARM_UP = 40  # tokens
# here, because the engine's own process imports this file too
ModelRegistry.register_model("Qwen3_5ForCausalLM", "vllm_text_hybrid:TextHybrid")


def main() -> None:
    from vllm import LLM, SamplingParams

    workloads = json.loads(Path(sys.argv[2]).read_text())
    llm = LLM(
        sys.argv[1],
        load_format="auto" if list(Path(sys.argv[1]).glob("*.safetensors")) else "dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.85,
        max_model_len=max(work["prompt"] + work["cap"] for work in workloads.values()) + 16,
        max_num_seqs=512,
        max_num_batched_tokens=16384,
        seed=0,
        gdn_prefill_backend="triton",
    )

    def generate(work, cap):
        requests = [
            {"prompt_token_ids": prompt}
            for prompt in work["prompt_ids"]
            for _ in range(work["group"])
        ]
        if work["stops"]:
            first = work["first_stop"]
            ends = {"stop_token_ids": list(range(first, first + work["stops"]))}
        else:
            ends = {"min_tokens": cap}
        params = SamplingParams(
            max_tokens=cap,
            temperature=1.0,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            **ends,
        )
        start = time.perf_counter()
        done = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [len(one.outputs[0].token_ids) for one in done]

    for name, work in workloads.items():
        generate(work, min(WARM_UP, work["cap"]))
        for _ in range(int(sys.argv[3])):
            seconds, lengths = generate(work, work["cap"])
            line = {"peer": "vllm", "workload": name, "seconds": seconds, "lengths": lengths}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
