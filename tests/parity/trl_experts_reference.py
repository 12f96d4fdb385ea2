"""Makes trl_experts.json: what TRL adds to its losses for the load of a mixture's experts.

Run it in an environment with trl==1.16.0 (it needs no network):

    python trl_experts_reference.py trl_experts.json

A real `SFTTrainer` and a real `GRPOTrainer` around small mixtures whose weights are a formula, so
that they are the same numbers on every machine. Rows have different lengths: TRL pads them, on the
right for SFT, and prompts on the left for GRPO.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch

KINDS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
COEFFICIENT = 0.5  # large: what is forgotten is seen
PROMPT = [5, 9, 4]  # of the rows of GRPO: one prompt, as a group has
ROWS = [  # ids of a row, and how many of them are the prompt of SFT
    ([5, 9, 4, 12, 7, 7, 3, 14, 6, 1], 3),
    ([5, 9, 4, 8, 10, 1], 3),
    ([5, 9, 4, 11, 13, 3, 6, 15, 15, 4, 8, 2, 9, 1], 3),
]
_SIZES: dict[str, Any] = dict(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=1,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)


def mixture(kind: str) -> Any:
    """Four experts, two for a token. Its config has a coefficient and does not ask for the loss."""
    import transformers

    name, more = {
        "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
        ),
        "olmoe": ("OlmoeConfig", {"num_experts": 4}),
        "gpt_oss": (
            "GptOssConfig",
            {
                "num_local_experts": 4,
                "head_dim": 8,
                "sliding_window": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    }[kind]
    config = getattr(transformers, name)(**_SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for i, (_, p) in enumerate(sorted(model.named_parameters())):
            places = torch.arange(p.numel(), dtype=torch.float64)
            waves = torch.sin(places * (1.3 + 0.61 * i) + 0.07 * places.square() + i)
            p.copy_((1.0 + 0.2 * waves if p.ndim == 1 else 0.5 * waves).view_as(p))
    return model.float()


def routers(model: Any) -> dict[str, Any]:
    """The weights of the routers, by name."""
    return {
        name: p
        for name, p in model.named_parameters()
        if name.endswith((".gate.weight", ".router.weight"))
    }


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel(
            {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(13)},
            unk_token="<unk>",
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def settings(directory: str) -> dict[str, Any]:
    return dict(
        output_dir=directory,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        router_aux_loss_coef=COEFFICIENT,
    )


def gradients(model: Any) -> dict[str, Any]:
    found = {name: p.grad.tolist() for name, p in routers(model).items()}
    model.zero_grad()
    return found


def sft(kind: str, directory: str, steps: int) -> dict[str, Any]:
    """`steps`: in how many micro-batches the rows are seen, one row in each or all in one."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list(
        [
            {"input_ids": ids, "completion_mask": [int(i >= n) for i in range(len(ids))]}
            for ids, n in ROWS
        ]
    )
    args = SFTConfig(
        **settings(directory),
        per_device_train_batch_size=len(ROWS) // steps,
        gradient_accumulation_steps=steps,
        max_length=None,
        completion_only_loss=True,
    )
    trainer = SFTTrainer(mixture(kind), args=args, train_dataset=rows, processing_class=tokenizer())
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = steps
    trained = sum(len(ids) - n for ids, n in ROWS)
    total = 0.0
    for batch in trainer.get_train_dataloader():
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(trained))
        loss.backward()
        total += loss.item()
    told = trainer._metrics["train"]["aux_loss"]
    return {"loss": total, "aux_loss": sum(told) / len(told), "routers": gradients(trainer.model)}


def grpo(kind: str, directory: str) -> dict[str, Any]:
    """Advantages of 0: what is left of the loss is that of the routers."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        mixture(kind),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            **settings(directory),
            num_generations=len(ROWS),
            per_device_train_batch_size=len(ROWS),
            max_completion_length=16,
            beta=0.0,
        ),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2"}] * len(ROWS)),
        processing_class=tokenizer(),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    answers = [ids[len(PROMPT) :] for ids, _ in ROWS]
    width = max(map(len, answers))
    mask = [[int(i < len(a)) for i in range(width)] for a in answers]
    inputs = {
        "prompt_ids": torch.tensor([[0, *PROMPT]] * len(ROWS)),
        "prompt_mask": torch.tensor([[0, *[1] * len(PROMPT)]] * len(ROWS)),
        "completion_ids": torch.tensor([a + [0] * (width - len(a)) for a in answers]),
        "completion_mask": torch.tensor(mask),
        "advantages": torch.zeros(len(ROWS)),
        "num_items_in_batch": torch.tensor(sum(map(sum, mask))),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    (told,) = trainer._metrics["train"]["aux_loss"]
    return {"loss": loss.item(), "aux_loss": told, "routers": gradients(trainer.model)}


def main(path: str) -> None:
    import transformers
    import trl

    assert trl.__version__ == "1.16.0", trl.__version__
    out: dict[str, Any] = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        for kind in KINDS:
            out["cases"][kind] = {
                "sft": sft(kind, directory, 1),
                "sft, a row at a time": sft(kind, directory, len(ROWS)),
                "grpo": grpo(kind, directory),
            }
    with open(path, "w") as file:
        json.dump(out, file)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
