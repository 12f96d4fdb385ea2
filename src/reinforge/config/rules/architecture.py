"""What a configuration asks of its model that the architecture does not have, by the model's own
configuration alone.

`plan` tells all of it, and a run ends with the first of it before weights are read. What is not
known of an architecture is found on its module, when that is loaded. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.config import architectures, model_table
from reinforge.config.adapter import AdapterConfig
from reinforge.config.sections import Sections
from reinforge.config.train import TrainConfig
from reinforge.core.errors import InputError

# how transformers plans to cut the weights of experts
CUT_EXPERTS = "moe_tp_experts"
# models of these may keep no state, and then have what the others lack
VARYING = frozenset({"granitemoehybrid"})
WHOLE = "Set it to 1; train.ranks still divides the weights."


def check(config: Sections, shape: Any) -> None:
    """Refuses the first thing that is wrong. `shape`: the model's configuration of transformers."""
    for error in refusals(config, shape):
        raise error


def refusals(config: Sections, shape: Any) -> Iterator[InputError]:
    """Everything that a model of this shape cannot do for a configuration."""
    facts = shape.to_dict()
    yield from _of_choice(shape.get_text_config().to_dict())
    yield from _of_slices(config.train, facts)
    yield from _of_routers(config.train, facts)
    yield from _of_cuts(config.train, facts, shape.get_text_config())
    yield from _of_adapters(config.adapter, facts)
    yield from _of_features(config, facts)


COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _of_choice(facts: Mapping[str, Any]) -> Iterator[InputError]:
    """No token goes to more experts than there are."""
    chosen = facts.get("num_experts_per_tok")
    counts = [facts[key] for key in COUNTS if isinstance(facts.get(key), int) and facts[key]]
    if isinstance(chosen, int) and counts and chosen > max(counts):
        yield InputError(
            f"its config.json sends every token to {chosen} experts (num_experts_per_tok) and has"
            f" {max(counts)}.",
            where="model.path",
            fix="Give the configuration that was saved with the weights.",
        )


def _of_slices(train: TrainConfig, facts: Mapping[str, Any]) -> Iterator[InputError]:
    """What ranks with a slice of a pack cannot compute."""
    if train.sequence_parallel == 1:
        return
    if architectures.keeps_state(facts):
        yield InputError(
            f"layers of {architectures.name_of(facts)} keep state beside keys and values, which a"
            " rank with a slice of a pack does not have.",
            where="train.sequence_parallel",
            fix="Leave it at 1.",
        )
    balance = architectures.balance_of(facts, train.router_aux_loss)
    for key, wanted in (("router_aux_loss", balance), ("router_z_loss", train.router_z_loss)):
        if wanted and architectures.has_experts(facts):
            yield InputError(
                "the router's load is that of whole packs, and sequence parallelism cuts them.",
                where=f"train.{key}",
                fix="Set it to 0, or train.sequence_parallel=1.",
            )


def _of_routers(train: TrainConfig, facts: Mapping[str, Any]) -> Iterator[InputError]:
    """What is asked of routers."""
    asked = {
        "router_aux_loss": bool(train.router_aux_loss),
        "router_z_loss": bool(train.router_z_loss),
        "router_bias_rate": bool(train.router_bias_rate),
        "router_replay": train.router_replay != "off",
    }
    name = architectures.name_of(facts)
    if not architectures.has_experts(facts):
        for key in (key for key, wanted in asked.items() if wanted):
            yield InputError(
                f"{name} has no experts, and so no router.",
                where=f"train.{key}",
                fix="Leave it out, or train a mixture of experts.",
            )
        return
    kind = model_table.type_of(facts)
    if asked["router_bias_rate"] and kind in model_table.NO_BIAS:
        yield InputError(
            f"the routers of {name} have no bias by which they choose.",
            where="train.router_bias_rate",
            fix="Leave it out; train.router_aux_loss balances the load of any router.",
        )
    if asked["router_replay"] and kind in model_table.NO_REPLAY:
        yield InputError(
            f"{name} does not choose its experts by one topk over all of them, so what it chose is"
            " not known.",
            where="train.router_replay",
            fix="Set it to off.",
        )


def _of_cuts(train: TrainConfig, facts: Mapping[str, Any], text: Any) -> Iterator[InputError]:
    """Whether FSDP2's ranks can share the matrices; Megatron has its own list."""
    if train.tensor_parallel == 1 or train.backend != "fsdp":
        return
    plan = getattr(text, "base_model_tp_plan", None)
    name = architectures.name_of(facts)
    why = None
    if not plan:
        why = f"transformers has no plan for cutting the matrices of {name}."
    elif CUT_EXPERTS in plan.values() and architectures.has_experts(facts):
        why = f"the experts of {name} are not cut over ranks."
    if why is not None:
        yield InputError(why, where="train.tensor_parallel", fix=WHOLE)


def _of_adapters(adapter: AdapterConfig | None, facts: Mapping[str, Any]) -> Iterator[InputError]:
    """What peft has for linear layers only, where it counts stacked experts among all of these."""
    if adapter is None or adapter.path or adapter.targets != "all-linear":
        return
    if model_table.type_of(facts) not in model_table.STACKED_BY_PEFT:
        return
    asked = {
        "kind": ("DoRA", adapter.kind == "dora"),
        "init": ("PiSSA", adapter.init == "pissa"),
    }
    for key, (name, wanted) in asked.items():
        if wanted:
            yield InputError(
                f"{name} is for linear layers, and the experts of {architectures.name_of(facts)}"
                " lie stacked.",
                where=f"adapter.{key}",
                fix="Leave it out, or name layers in adapter.targets ([q_proj, v_proj]).",
            )


def _of_features(config: Sections, facts: Mapping[str, Any]) -> Iterator[InputError]:
    """What the table of architectures says no to."""
    found = model_table.support(facts)
    adapter = config.adapter
    asked = {
        "model.exact": ("exact", config.model.exact),
        "rollout.precision": ("fp8", config.rollout.precision == "fp8"),
        "train.precision": ("fp8", config.train.precision == "fp8"),
        "adapter.kind": ("qlora", adapter is not None and adapter.kind == "qlora"),
    }
    if found.name in VARYING and not architectures.keeps_state(facts):
        return
    for key, (feature, wanted) in asked.items():
        if not wanted or found.cells[feature].mark != "no":
            continue
        if feature == "exact" and architectures.has_equal_latent_heads(facts):
            continue
        yield InputError(
            f"{architectures.name_of(facts)} does not go with it: {found.cells[feature].why}.",
            where=key,
            fix=FIXES[feature],
        )


FIXES = {
    "exact": "Set it to false.",
    "fp8": "Leave it out for this model.",
    "qlora": "Use lora, or the original model.",
}
