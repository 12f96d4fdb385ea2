"""TRL's side of cpu_vs_trl.py: runs in TRL's own environment. argv: model prompts cap steps
prompts_per_step group.
"""

import json
import sys
import time
from pathlib import Path

import datasets
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, prompts, cap, steps, per_step, group = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
tokenizer = AutoTokenizer.from_pretrained(model)
lengths: list[int] = []
times: list[float] = []


def reward(completions, completion_ids=None, **_):
    lengths.extend(len(ids) for ids in completion_ids)
    return [float(len(c) % 7) for c in completions]


class Clock(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        times.append(time.perf_counter())


args = GRPOConfig(
    output_dir="/tmp/trl-out",
    per_device_train_batch_size=per_step * group,
    gradient_accumulation_steps=1,
    num_generations=group,
    max_completion_length=cap,
    max_steps=steps,
    learning_rate=1e-6,
    bf16=False,
    beta=0.0,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    gradient_checkpointing=False,
    use_cpu=True,
    disable_tqdm=True,
    model_init_kwargs={"dtype": "float32"},
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=args,
    train_dataset=datasets.Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[Clock()],
)
start = time.perf_counter()
trainer.train()
print(
    json.dumps(
        {
            "steps": [b - a for a, b in zip([start, *times], times, strict=False)],
            "length": sum(lengths) / len(lengths),
        }
    )
)
