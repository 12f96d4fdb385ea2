"""Makes trl_preference.json: what TRL computes for preference, unpaired, reward, distillation and
DFT losses on given numbers.

Run it in an environment with trl==1.16.0 (it needs no network):

    python trl_preference_reference.py trl_preference.json

TRL's own loss methods are called on objects that have only the attributes they read, with models
that return float64 leaf tensors (log-probs, scores or logits), so that gradients can be read. Rows
come as TRL wants them: all chosen answers, then all rejected ones. Every row has a prompt of one
token, because TRL's ORPO also trains the prompt.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace as Bag
from typing import Any

import torch
from torch import Tensor

LENGTHS = [5, 3, 8, 1, 2, 7, 4, 6]  # trained tokens of four chosen and four rejected answers
WIDTH = 8
VOCABULARY = 6
LABELS = [1, 0, 0, 1, 1, 1, 0, 1]


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def make_inputs() -> dict[str, Tensor]:
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double()
    logprobs = -draw(0, 8, WIDTH).abs() * mask
    return {
        "mask": mask,
        "logprobs": logprobs,
        "reference": (logprobs + draw(1, 8, WIDTH, scale=0.5)) * mask,
        "collision": -draw(2, 8, WIDTH).abs() * mask,
        "kl_logprobs": -draw(3, 8, WIDTH).abs() * mask,
        "kl_reference": -draw(3, 8, WIDTH).abs() * mask - 0.1 * mask,
        "scores": draw(4, 8),
        "margin": draw(5, 4).abs(),
        "logits": draw(6, 8, WIDTH + 1, VOCABULARY),
        "ids": torch.arange(8 * (WIDTH + 1)).view(8, WIDTH + 1) * 7 % VOCABULARY,
        "student": draw(7, 10, VOCABULARY, scale=2.0),
        "teacher": draw(8, 10, VOCABULARY, scale=2.0),
        "wide_teacher": draw(9, 10, VOCABULARY + 3, scale=2.0),
        "hidden": draw(10, 10, 4),
        "head": draw(11, VOCABULARY, 4),
        "teacher_hidden": draw(12, 10, 3),
        "teacher_head": draw(13, VOCABULARY, 3),
    }


INPUTS = make_inputs()
FULL = torch.cat((torch.zeros(8, 1), INPUTS["mask"]), 1).long()  # with the prompt column


def bare(cls: type, **attributes: Any) -> Any:
    """An object of a trainer's class that was never initialised."""
    accelerator = Bag(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        parallelism_config=None,
    )
    made = type(cls.__name__, (cls,), {"__init__": lambda self: None})()
    common = {
        "accelerator": accelerator,
        "model": Bag(training=True, is_gradient_checkpointing=False),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "aux_loss_enabled": False,
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "is_encoder_decoder": False,
    }
    for name, value in (common | attributes).items():
        object.__setattr__(made, name, value)
    return made


def fused(logprobs: Tensor) -> Any:
    """What TRL's fused head returns: nothing but zeros where nothing is trained."""
    logprobs = logprobs * INPUTS["mask"].to(logprobs.dtype)
    zeros = torch.zeros_like(logprobs)
    return Bag(
        log_probs=logprobs,
        entropy=zeros,
        mean_logits=zeros,
        is_top1=zeros.bool(),
        label_mask=INPUTS["mask"],
        log_sum_sq_probs=INPUTS["collision"].to(logprobs.dtype),
    )


def graded(name: str, leaf: Tensor, loss: Tensor, **settings: Any) -> dict[str, Any]:
    loss.backward()
    assert leaf.grad is not None and torch.isfinite(loss)
    return {
        "name": name,
        "settings": settings,
        "loss": loss.item(),
        "gradient": leaf.grad.double().tolist(),
    }


def dpo(
    types: list[str],
    *,
    weights: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> dict[str, Any]:
    from trl import DPOTrainer

    given = {
        "beta": 0.3,
        "label_smoothing": 0.1,
        "tau": 0.05,
        "divergence": "reverse_kl",
        "alpha": 0.5,
        "ld_alpha": None,
        "wpo": False,
    } | settings
    reference = INPUTS["reference"].to(dtype)
    trainer = bare(
        DPOTrainer,
        loss_types=types,
        loss_weights=weights or [1.0],
        beta=given["beta"],
        label_smoothing=given["label_smoothing"],
        f_divergence_type=given["divergence"],
        f_alpha_divergence_coef=given["alpha"],
        ld_alpha=given["ld_alpha"],
        use_weighting=given["wpo"],
        precompute_ref_logps=False,
        args=Bag(discopop_tau=given["tau"], gradient_checkpointing_kwargs=None),
        ref_model=lambda **kw: fused(reference),
    )
    leaf = INPUTS["logprobs"].to(dtype, copy=True).requires_grad_()
    inputs = {
        "input_ids": INPUTS["ids"],
        "attention_mask": torch.ones_like(FULL),
        "completion_mask": FULL,
    }
    return graded(
        "+".join(types),
        leaf,
        trainer._compute_loss(lambda **kw: fused(leaf), inputs, False),
        weights=weights,
        **settings,
    )


def kto(name: str, **settings: Any) -> dict[str, Any]:
    from trl import KTOTrainer

    leaf = INPUTS["logprobs"].clone().requires_grad_()

    def model(own: Tensor, mismatched: Tensor) -> Any:
        return lambda input_ids, **kw: fused(mismatched if (input_ids == -1).all() else own)

    trainer = bare(
        KTOTrainer,
        loss_type=name,
        beta=0.3,
        desirable_weight=settings.get("desirable_weight", 1.0),
        undesirable_weight=settings.get("undesirable_weight", 1.0),
        calculate_KL=name == "kto",
        precompute_ref_logps=False,
        args=Bag(gradient_checkpointing_kwargs=None),
        ref_model=model(INPUTS["reference"], INPUTS["kl_reference"]),
    )
    ones = torch.ones_like(FULL)
    inputs = {
        "input_ids": INPUTS["ids"],
        "attention_mask": ones,
        "completion_mask": FULL,
        "KL_input_ids": -ones,
        "KL_attention_mask": ones,
        "KL_completion_mask": FULL,
        "label": torch.tensor(LABELS, dtype=torch.bool),
    }
    return graded(
        name,
        leaf,
        trainer._compute_loss(model(leaf, INPUTS["kl_logprobs"]), inputs, False),
        **settings,
    )


def free(cls: type, name: str, settings: dict[str, Any], **attributes: Any) -> dict[str, Any]:
    """CPO and ORPO trainers run on logits."""
    leaf = INPUTS["logits"].clone().requires_grad_()
    labels = torch.where(FULL == 1, INPUTS["ids"], -100)
    attention = FULL.clone()
    attention[:, 0] = 1
    batch = {
        f"{side}_{key}": value[rows]
        for side, rows in (("chosen", slice(0, 4)), ("rejected", slice(4, 8)))
        for key, value in (
            ("input_ids", INPUTS["ids"]),
            ("labels", labels),
            ("attention_mask", attention),
        )
    }
    trainer = bare(cls, pad_token_id=0, padding_value=0, **attributes)
    loss, _ = trainer.get_batch_loss_metrics(lambda *a, **kw: Bag(logits=leaf), batch)
    return graded(name, leaf, loss, **settings)


def reward(**settings: Any) -> dict[str, Any]:
    from trl import RewardTrainer

    leaf = INPUTS["scores"].clone().requires_grad_()
    inputs = {"attention_mask": FULL} | (
        {"margin": INPUTS["margin"]} if settings.get("margin") else {}
    )
    trainer = bare(RewardTrainer, args=Bag(center_rewards_coefficient=settings.get("centre")))
    return graded(
        "margin" if settings.pop("margin", False) else "bradley_terry",
        leaf,
        trainer.compute_loss(lambda **kw: Bag(logits=leaf[:, None]), inputs),
        **settings,
    )


def sft(name: str) -> dict[str, Any]:
    from trl import SFTTrainer

    leaf = INPUTS["logprobs"].clone().requires_grad_()
    trainer = bare(
        SFTTrainer,
        compute_loss_func=None,
        label_smoother=None,
        args=Bag(loss_type=name, average_tokens_across_devices=False),
    )
    return graded(
        name, leaf, trainer.compute_loss(lambda **kw: fused(leaf), {"attention_mask": FULL})
    )


def divergences() -> list[dict[str, Any]]:
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.gold.gold_trainer import ULDLoss
    from trl.experimental.sdft.loss_utils import compute_topk_self_distillation_loss
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    out = []
    for beta, temperature in ((0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.1, 2.0), (0.9, 0.7)):
        leaf = INPUTS["student"].clone().requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(
            leaf, INPUTS["teacher"], beta=beta, temperature=temperature
        )
        out.append(graded("jsd", leaf, loss, beta=beta, temperature=temperature))
        h = INPUTS["hidden"].float().requires_grad_()
        w = INPUTS["head"].float().requires_grad_()
        loss, _, _ = _chunked_divergence_loss(
            h[None],
            INPUTS["teacher_hidden"].float()[None],
            w,
            INPUTS["teacher_head"].float(),
            torch.ones(1, len(h)),
            beta,
            temperature=temperature,
        )
        case = graded("chunked jsd", h, loss, beta=beta, temperature=temperature)
        out.append(case | {"gradient_head": w.grad.tolist()})
    for reverse in (False, True):
        leaf = INPUTS["student"].clone().requires_grad_()
        parts = compute_topk_self_distillation_loss(
            leaf,
            INPUTS["teacher"],
            distillation_topk=3,
            distillation_alpha=float(reverse),
            distillation_add_tail=True,
        )
        out.append(graded("student top-k", leaf, parts.mean(), k=3, reverse=reverse))
    leaf = INPUTS["student"].clone().requires_grad_()
    uld = bare(
        ULDLoss,
        skip_student_eos=False,
        skip_teacher_eos=False,
        token_merge_strategy="none",
        use_extended_uld=False,
        use_hybrid_loss=False,
        student_temperature=1.5,
        teacher_temperature=1.5,
        distillation_weight=1.0,
        ignore_index=-100,
    )
    ids = torch.zeros(1, 10, dtype=torch.long)
    loss = uld._compute_distillation_loss(
        leaf[None], INPUTS["wide_teacher"][None], ids, ids, ids, ids
    )
    out.append(graded("uld", leaf, loss, temperature=1.5))
    return out


def main(path: str) -> None:
    import trl
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    assert trl.__version__ == "1.16.0", trl.__version__
    plain = [
        "sigmoid",
        "hinge",
        "ipo",
        "robust",
        "exo_pair",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "aot",
        "aot_unpaired",
        "apo_zero",
        "apo_down",
        "discopop",
        "sft",
        "sigmoid_norm",
    ]
    pairs = [dpo([name]) for name in plain]
    pairs += [
        dpo([name], divergence=d)
        for name in ("sigmoid", "hinge", "robust")
        for d in ("forward_kl", "js_divergence")
    ]
    pairs += [
        dpo([name], divergence="alpha_divergence", alpha=0.4, dtype=torch.float32)
        for name in ("sigmoid", "hinge")
    ]
    pairs += [dpo([name], ld_alpha=0.3) for name in ("sigmoid", "apo_zero")] + [
        dpo([name], wpo=True) for name in ("sigmoid", "ipo")
    ]  # hinge with it fails in TRL
    pairs += [
        dpo(["sigmoid", "bco_pair", "sft"], weights=[0.8, 0.2, 1.0]),
        dpo(["discopop"], tau=0.3, beta=0.1),
    ]
    cpo = {
        "beta": 0.3,
        "label_smoothing": 0.1,
        "cpo_alpha": 0.5,
        "simpo_gamma": 0.4,
        "alpha": 0.0,
        "aux_loss_coef": 0.0,
    }
    from_logits = [
        free(
            CPOTrainer,
            "cpo",
            {"label_smoothing": 0.1, "nll_weight": 0.5},
            **cpo,
            loss_type="sigmoid",
        ),
        free(
            CPOTrainer,
            "simpo",
            {"label_smoothing": 0.1, "gamma": 0.4},
            **cpo | {"loss_type": "simpo", "cpo_alpha": 0},
        ),
        free(
            CPOTrainer,
            "alphapo",
            {"gamma": 0.4, "alpha": 0.25},
            **cpo | {"loss_type": "simpo", "cpo_alpha": 0, "alpha": 0.25, "label_smoothing": 0},
        ),
        free(ORPOTrainer, "orpo", {}, beta=0.3),
    ]
    out = {
        "trl": trl.__version__,
        "lengths": LENGTHS,
        "labels": LABELS,
        "inputs": {k: v.tolist() for k, v in INPUTS.items()},
        "pairs": pairs,
        "logits": from_logits,
        "unpaired": [
            kto("kto"),
            kto("kto", desirable_weight=1.3, undesirable_weight=0.7),
            kto("apo_zero_unpaired"),
        ],
        "reward": [reward(), reward(centre=0.01), reward(margin=True)],
        "sft": [sft("nll"), sft("dft")],
        "divergences": divergences(),
    }
    with open(path, "w") as file:
        json.dump(out, file)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
