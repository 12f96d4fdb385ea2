"""TRL's side of gpu_dpo.py, in its own environment. argv: a JSON object with model, rows, steps,
pairs, micro, precision, precompute, rate, beta.

Knobs: rows in the order of the file, sdpa attention, no gradient checkpointing, fused AdamW, TRL's
own fused output head (it never holds all logits). `precision`: "pure" has weights, gradients and
moments in bfloat16; "mixed" has float32 weights under bfloat16 autocast, the precision that our
masters have. `padding_free` has no effect in TRL 1.16 (it warns and pads). `liger`: only where it
is installed.
"""

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

import datasets
import torch
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

given = json.loads(sys.argv[1])
cuda = torch.cuda.is_available()
pure = given["precision"] == "pure"
micro = given["micro"]
liger = cuda and importlib.util.find_spec("liger_kernel") is not None
folder = tempfile.mkdtemp()
tokenizer = AutoTokenizer.from_pretrained(given["model"])
rows = datasets.Dataset.from_list(
    [json.loads(line) for line in Path(given["rows"]).read_text().splitlines()]
)
times = []
spent = {"precompute": 0.0}


def now():
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        times.append(now())


class Timed(DPOTrainer):
    def _precompute_ref_logps(self, *args, **kwargs):
        start = now()
        found = super()._precompute_ref_logps(*args, **kwargs)
        spent["precompute"] += now() - start
        return found


settings = {
    "per_device_train_batch_size": micro,
    "gradient_accumulation_steps": given["pairs"] // micro,
    "learning_rate": given["rate"],
    "lr_scheduler_type": "constant",
    "beta": given["beta"],
    "bf16": cuda and not pure,
    "gradient_checkpointing": False,
    "precompute_ref_log_probs": given["precompute"],
    "precompute_ref_batch_size": micro,
    "max_length": 2048,
    "optim": "adamw_torch_fused",
    "train_sampling_strategy": "sequential",
    "use_liger_kernel": liger,
    "torch_compile": given["compile"],
}
kwargs = {"dtype": "bfloat16" if pure and cuda else "float32", "attn_implementation": "sdpa"}
args = DPOConfig(
    output_dir=folder,
    max_steps=given["steps"],
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    seed=0,
    use_cpu=not cuda,
    model_init_kwargs=kwargs,
    **settings,
)
trainer = Timed(
    model=given["model"],
    args=args,
    train_dataset=rows,
    processing_class=tokenizer,
    callbacks=[Clock()],
)
ready = trainer.train_dataset
lengths = [
    2 * len(p) + len(c) + len(r)
    for p, c, r in zip(ready["prompt_ids"], ready["chosen_ids"], ready["rejected_ids"], strict=True)
]
start = now()
trainer.train()
seconds = [b - a for a, b in zip([start, *times], times, strict=False)]
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
gib = (lambda get: get() / 2**30) if cuda else (lambda get: 0.0)
print(
    json.dumps(
        {
            "peer": "trl",
            **{k: given[k] for k in ("precision", "micro", "precompute", "compile")},
            "seconds": seconds,
            "losses": losses,
            "tokens": [
                sum(lengths[i : i + given["pairs"]])
                for i in range(0, given["pairs"] * given["steps"], given["pairs"])
            ],
            "peak_gib": gib(torch.cuda.max_memory_allocated),
            "reserved_gib": gib(torch.cuda.max_memory_reserved),
            "precompute_s": spent["precompute"],
            "knobs": {**settings, **kwargs},
        }
    )
)
