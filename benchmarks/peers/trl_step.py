"""TRL's side of gpu_step.py, in its own environment. argv: model-directory response micro-batch
vllm|transformers.

Knobs: bfloat16, vLLM colocated with its default reservation of 0.3 of the card, KL off, no gradient
checkpointing, the largest micro-batch that fits. Two steps; the first one includes warm-up and does
not count.
"""

import json
import sys
import time

import datasets
import torch
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

path = sys.argv[1]
response = int(sys.argv[2])
micro = int(sys.argv[3])
engine = sys.argv[4]
tokenizer = AutoTokenizer.from_pretrained(path)
tokenizer.padding_side = "left"
ids = torch.randint(
    10, min(49000, len(tokenizer) - 1), (64 * 6, 250), generator=torch.Generator().manual_seed(1)
).tolist()
rows = datasets.Dataset.from_dict({"prompt": [tokenizer.decode(row) for row in ids]})
times = []


class Clock(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        torch.cuda.synchronize()
        times.append(time.perf_counter())


extra = (
    {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": 2048,
    }
    if engine == "vllm"
    else {}
)
args = GRPOConfig(
    output_dir="/tmp/trl-out",
    per_device_train_batch_size=micro,
    gradient_accumulation_steps=512 // micro,
    num_generations=8,
    max_completion_length=response,
    max_steps=2,
    learning_rate=1e-6,
    bf16=True,
    beta=0.0,
    temperature=1.0,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    gradient_checkpointing=False,
    disable_tqdm=True,
    model_init_kwargs={"dtype": "bfloat16"},
    **extra,
)
trainer = GRPOTrainer(
    model=path,
    reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
    args=args,
    train_dataset=rows,
    processing_class=tokenizer,
    callbacks=[Clock()],
)
start = time.perf_counter()
trainer.train()
seconds = [b - a for a, b in zip([start, *times], times, strict=False)]
log = [line for line in trainer.state.log_history if "step_time" in line][-1]
free, total = torch.cuda.mem_get_info()
print(
    json.dumps(
        {
            "peer": f"trl+{engine}",
            "step": min(seconds[1:]),
            "steps": seconds,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "device_gib": (total - free) / 2**30,
            "log": {k: v for k, v in log.items() if "sampling" in k or "length" in k},
        }
    )
)
