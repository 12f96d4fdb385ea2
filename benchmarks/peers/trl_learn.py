"""TRL's side of gpu_learn.py, in its own environment. argv: model-directory rows.jsonl steps.

The settings of gpu_learn.py's first run.
"""

import json
import re
import sys
import time
from pathlib import Path

import datasets
import torch
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

path = sys.argv[1]
rows = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]
steps = int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(path)
tokenizer.padding_side = "left"


def prompt(question):
    return [{"role": "user", "content": question + "\nReply with the final number only."}]


def last_number(text):
    return (re.findall(r"-?\d+", text) or [""])[-1]


def reward(completions, answer, **_):
    return [
        float(last_number(c[0]["content"]) == a) for c, a in zip(completions, answer, strict=True)
    ]


@torch.no_grad()
def accuracy(model):
    model.eval()
    test = [r for r in rows if r["split"] == "test"]
    texts = [
        tokenizer.apply_chat_template(prompt(r["q"]), add_generation_prompt=True, tokenize=False)
        for r in test
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to("cuda")
    out = model.generate(**batch, max_new_tokens=64, do_sample=False)[
        :, batch["input_ids"].shape[1] :
    ]
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    return sum(last_number(t) == r["a"] for t, r in zip(texts, test, strict=True)) / len(test)


train = datasets.Dataset.from_list(
    [{"prompt": prompt(r["q"]), "answer": r["a"]} for r in rows if r["split"] != "test"]
)
args = GRPOConfig(
    output_dir="/tmp/trl-out",
    per_device_train_batch_size=128,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_completion_length=64,
    max_steps=steps,
    learning_rate=1e-5,
    lr_scheduler_type="constant",
    bf16=True,
    beta=0.0,
    temperature=1.0,
    logging_steps=5,
    report_to=[],
    save_strategy="no",
    gradient_checkpointing=False,
    disable_tqdm=True,
    seed=0,
)
trainer = GRPOTrainer(
    model=path, reward_funcs=reward, args=args, train_dataset=train, processing_class=tokenizer
)
before = accuracy(trainer.model)
start = time.perf_counter()
trainer.train()
seconds = time.perf_counter() - start
print(
    json.dumps(
        {
            "peer": "trl+transformers",
            "seconds": seconds,
            "before": before,
            "after": accuracy(trainer.model),
        }
    )
)
