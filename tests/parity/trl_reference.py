"""Makes trl_grpo.json: what TRL computes for given rewards, log-probs and masks.

Run it in an environment with trl==1.16.0 (it needs no network):

    python trl_reference.py trl_grpo.json

A real `GRPOTrainer` around a random two-layer model is asked twice. Advantages come out of its own
`_generate_and_score_completions`, with `_generate` replaced by fixed completions and the reward
function by fixed rewards. Losses come out of its own `_compute_loss`, with the forward pass
replaced by float64 leaf tensors, so that the gradient with respect to the log-probs can be read.
One case accumulates two micro-batches the way the trainer does.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from itertools import product
from typing import Any

import torch

GROUP = 4
MAX_LENGTH = 8
LENGTHS = [5, 3, 8, 1, 2, 7, 4, 6]  # two groups of four completions
REWARDS = {
    "plain": [1.0, 0.0, 0.0, 1.0, 0.3, -2.0, 0.7, 5.0],
    "equal group": [0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0],
    "unscored": [1.0, None, 0.0, 1.0, None, None, 0.5, None],
    "close": [1e6, 1e6 + 1, 1e6, 1e6 + 1, 0.5, 0.25, 0.125, 0.0],
}


def tiny_policy(directory: str) -> tuple[str, Any]:
    """The path of a random two-layer model, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel(
            {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(13)},
            unk_token="<unk>",
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    model.save_pretrained(f"{directory}/model")  # the reference of beta > 0 is loaded from a path
    return f"{directory}/model", tokenizer


def make_trainer(directory: str, **settings: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = tiny_policy(directory)
    args = GRPOConfig(
        output_dir=directory,
        report_to=[],
        use_cpu=True,
        bf16=False,
        num_generations=GROUP,
        max_completion_length=MAX_LENGTH,
        per_device_train_batch_size=len(LENGTHS) // settings.get("gradient_accumulation_steps", 1),
        **settings,
    )
    rows = Dataset.from_list([{"prompt": "w1 w2"}, {"prompt": "w3"}])
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: trainer.fixed_rewards,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    return trainer


def advantages_of(trainer: Any, rewards: list[float | None]) -> list[float]:
    trainer.fixed_rewards = rewards
    ids = [[4] * (n - 1) + [1] for n in LENGTHS]
    trainer._generate = lambda prompts: (
        [[4, 5]] * len(ids),
        ids,
        None,
        ["w"] * len(ids),
        None,
        {},
        None,
        None,
    )
    inputs = [{"prompt": "w1 w2"}] * GROUP + [{"prompt": "w3"}] * GROUP
    return trainer._generate_and_score_completions(inputs)["advantages"].tolist()


def inputs_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), MAX_LENGTH)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    logprobs = -noise(1.0).abs()
    mask = (torch.arange(MAX_LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    advantages[2] = 0.0
    return {
        "logprobs": logprobs,
        "old": logprobs + noise(0.3),
        "reference": logprobs + noise(0.5),
        "mask": mask,
        "advantages": advantages,
    }


def loss_of(
    trainer: Any, given: dict[str, torch.Tensor], parts: int, with_old: bool
) -> dict[str, Any]:
    """Loss and gradient, summed over `parts` micro-batches as the trainer would accumulate them."""
    logprobs = given["logprobs"].clone().requires_grad_()
    total = 0.0
    for rows in torch.arange(len(LENGTHS)).chunk(parts):
        trainer._get_per_token_logps_and_entropies = lambda *a, rows=rows, **k: (
            logprobs[rows],
            torch.ones_like(logprobs[rows]),
            None,
        )
        mask = given["mask"][rows]
        inputs = {
            "prompt_ids": torch.full((len(rows), 2), 4),
            "prompt_mask": torch.ones(len(rows), 2, dtype=torch.long),
            "completion_ids": torch.full_like(mask, 4),
            "completion_mask": mask,
            "advantages": given["advantages"][rows],
            "ref_per_token_logps": given["reference"][rows],
            "num_items_in_batch": given["mask"].sum(),
        }
        if with_old:
            inputs["old_per_token_logps"] = given["old"][rows]
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    assert math.isfinite(total) and logprobs.grad is not None
    return {"loss": total, "gradient": logprobs.grad.tolist()}


def main(path: str) -> None:
    import trl

    assert trl.__version__ == "1.16.0", trl.__version__
    out: dict[str, Any] = {
        "trl": trl.__version__,
        "max_length": MAX_LENGTH,
        "group": [0] * GROUP + [1] * GROUP,
        "advantages": [],
        "losses": [],
    }
    inputs = inputs_of(0)
    out["inputs"] = {name: value.tolist() for name, value in inputs.items()}
    with tempfile.TemporaryDirectory() as directory:
        for scale in ("group", "batch", "none"):
            trainer = make_trainer(directory, scale_rewards=scale)
            for name, rewards in REWARDS.items():
                out["advantages"].append(
                    {
                        "case": name,
                        "scale": scale,
                        "rewards": rewards,
                        "advantages": advantages_of(trainer, rewards),
                    }
                )
        for kind, (beta, weighted), parts in product(
            ("grpo", "dr_grpo", "dapo"), ((0.0, False), (0.04, False), (0.04, True)), (1, 2)
        ):
            high = 0.28 if kind == "dapo" else 0.2
            trainer = make_trainer(
                directory,
                loss_type=kind,
                beta=beta,
                epsilon=0.2,
                epsilon_high=high,
                importance_sampling_level="token",
                use_bias_correction_kl=weighted,
                gradient_accumulation_steps=parts,
                steps_per_generation=parts,
            )
            for with_old in (True, False):
                case = {
                    "name": kind,
                    "beta": beta,
                    "kl_weighted": weighted,
                    "clip": [0.2, high],
                    "micro_batches": parts,
                    "with_old": with_old,
                }
                out["losses"].append(case | loss_of(trainer, inputs, parts, with_old))
    with open(path, "w") as file:
        json.dump(out, file)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
