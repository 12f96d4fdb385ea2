"""Which architectures are trained here: with which engine, which backend and which feature.

`reinforge models` prints it, docs/models.md is made from it, and `plan` refuses by the same words.
`RIGHT` is what `benchmarks/architectures.py` ran at toy size, which says where the table differs
from what it finds; what is refused, and why, is `architectures.KNOWN`. A model that stands in
neither is not tried: when it is loaded `models.proof` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reinforge.config import megatron
from reinforge.config.architectures import KNOWN, refusal
from reinforge.config.engine import SERVERS

Mark = Literal["yes", "code", "no"]
Verdict = Literal["right", "trains", "refused", "not tried"]

# what the columns mean
ENGINES = {
    "native": "the trainer's own module generates",
    **{server: f"`rollout.engine: {server}`" for server in SERVERS},
}
BACKENDS = {
    "local": "`train.backend: local`, one process",
    "fsdp": "`train.backend: fsdp`",
    "deepspeed": "`train.backend: deepspeed`",
    "megatron": "`train.backend: megatron`",
}
FEATURES = {
    "packed": "samples of several lengths end to end, without padding",
    "shared": "the prompt of a group is computed once",
    "lora": "LoRA, also merged",
    "qlora": "LoRA on a base in 4 bits",
    "exact": "`model.exact`: sampling and training have the same bits",
    "fp8": "`rollout.precision: fp8`",
    "gguf": "`reinforge export --gguf f16`",
}
COLUMNS = {**ENGINES, **BACKENDS, **FEATURES}
# these differ most from one architecture to another
TOLD = ("native", "exact", "fp8", "qlora", "megatron", "gguf")

RIGHT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "apertus",
            "arcee",
            "biogpt",
            "bitnet",
            "cohere",
            "cohere2",
            "cohere_compass_text",
            "ctrl",
            "cwm",
            "ernie4_5",
            "exaone4",
            "gemma",
            "gemma2",
            "gemma3",
            "gemma3_text",
            "gemma4",
            "gemma4_text",
            "gemma4_unified_text",
            "glm",
            "glm4",
            "gpt_bigcode",
            "gpt_neox",
            "granite",
            "helium",
            "hunyuan_v1_dense",
            "hyperclovax",
            "jais2",
            "llama",
            "ministral",
            "ministral3",
            "mistral",
            "nanochat",
            "nemotron",
            "olmo",
            "olmo2",
            "olmo3",
            "opt",
            "persimmon",
            "phi",
            "phi3",
            "qwen2",
            "qwen3",
            "seed_oss",
            "smollm3",
            "stablelm",
            "starcoder2",
            "vaultgemma",
        ),
        (),
    ),
    **dict.fromkeys(
        (
            "gemma3n_text",
            "granite_swa",
            "minicpm3",
            "youtu",
        ),
        ("exact",),
    ),
    **dict.fromkeys(
        (
            "afmoe",
            "cohere2_moe",
            "dots1",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "gpt-sw3",
            "gpt2",
            "granitemoe",
            "granitemoeshared",
            "hunyuan_v1_moe",
            "hy_v3",
            "jetmoe",
            "kimi_linear",
            "laguna",
            "lfm2",
            "lfm2_moe",
            "mellum",
            "minimax_m2",
            "mixtral",
            "olmo_hybrid",
            "olmoe",
            "phimoe",
            "qwen2_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_moe",
            "qwen3_next",
            "solar_open",
        ),
        ("fp8",),
    ),
    **dict.fromkeys(
        (
            "aria_text",
            "axk1",
            "bamba",
            "dbrx",
            "deepseek_v2",
            "deepseek_v3",
            "falcon_h1",
            "falcon_mamba",
            "glm4_moe_lite",
            "gpt_oss",
            "granitemoe_swa",
            "granitemoehybrid",
            "jamba",
            "llama4",
            "llama4_text",
            "mamba2",
            "mimo_v2_flash",
            "nemotron_h",
        ),
        (
            "exact",
            "fp8",
        ),
    ),
    **dict.fromkeys(
        (
            "longcat_flash",
            "mamba",
        ),
        (
            "exact",
            "fp8",
            "qlora",
        ),
    ),
}

# mixtures whose routers have no bias by which they choose
NO_BIAS = frozenset(
    {
        "aria_text",
        "cohere2_moe",
        "dbrx",
        "deepseek_v2",
        "flex_olmo",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan_v1_moe",
        "jamba",
        "jetmoe",
        "llama4",
        "llama4_text",
        "mellum",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_moe",
        "qwen3_next",
    }
)
# mixtures that do not choose by one topk over all experts: what they chose is not known
NO_REPLAY = frozenset({"aria_text", "longcat_flash", "phimoe"})
# mixtures whose stacked experts peft counts among all linear layers
STACKED_BY_PEFT = frozenset(
    {
        "afmoe",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe",
        "glm_moe_dsa",
        "hunyuan_v1_moe",
        "longcat_flash",
        "mellum",
        "minimax",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe",
        "qwen3_omni_moe_thinker",
        "solar_open",
    }
)

# the names under which people know some of them
KNOWN_AS: dict[str, str] = {
    "llama": "Llama 2, 3.x; SmolLM2, TinyLlama, Yi, DeepSeek-R1-Distill-Llama",
    "llama4_text": "Llama 4",
    "qwen2": "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_5_moe_text": "Qwen3.5, mixtures of experts",
    "mistral": "Mistral 7B, Mistral Nemo, Zephyr",
    "ministral3": "Ministral 3",
    "mixtral": "Mixtral",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n",
    "gemma4_text": "Gemma 4",
    "phi": "Phi-1, Phi-2",
    "phi3": "Phi-3, Phi-4",
    "phimoe": "Phi-3.5-MoE",
    "gpt_oss": "gpt-oss-20b, gpt-oss-120b",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, DeepSeek-R1",
    "deepseek_v32": "DeepSeek-V3.2",
    "olmo": "OLMo 1",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "granite": "Granite 3",
    "granitemoehybrid": "Granite 4",
    "smollm3": "SmolLM3",
    "glm4": "GLM-4-9B-0414, GLM-4-32B-0414",
    "glm4_moe": "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "minimax_m2": "MiniMax-M2",
    "cohere2": "Command R7B, Command A",
    "cohere": "Command R, Aya 23",
    "gpt2": "GPT-2",
    "gpt_bigcode": "StarCoder",
    "starcoder2": "StarCoder2",
    "opt": "OPT",
    "gpt_neox": "Pythia, GPT-NeoX-20B",
    "mamba": "Mamba",
    "mamba2": "Mamba-2, Codestral-Mamba",
    "falcon_mamba": "Falcon-Mamba",
    "bamba": "Bamba",
    "jamba": "Jamba",
    "kimi_linear": "Kimi-Linear-48B-A3B",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-8B-A1B",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2",
    "falcon_h1": "Falcon-H1",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "ERNIE-4.5-0.3B",
    "ernie4_5_moe": "ERNIE-4.5-21B-A3B",
    "hunyuan_v1_dense": "Hunyuan-7B",
    "hunyuan_v1_moe": "Hunyuan-A13B",
    "dots1": "dots.llm1",
    "dbrx": "DBRX",
    "exaone4": "EXAONE-4.0",
    "longcat_flash": "LongCat-Flash",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "minicpm3": "MiniCPM3",
    "apertus": "Apertus",
    "arcee": "AFM-4.5B",
    "nemotron": "Minitron",
    "stablelm": "StableLM 2",
}

# multimodal checkpoints of which the text half alone is loaded: what ran with it ran with them
_TEXT_HALF = {name: f"{name}_text" for name in ("llama4", "qwen3_5", "qwen3_5_moe")}

# where more was run than toys in one process
_ON_RANKS = {
    "fsdp": frozenset(
        {
            "deepseek_v3",
            "gpt_oss",
            "granitemoe",
            "llama",
            "mixtral",
            "olmoe",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_5_text",
            "qwen3_moe",
        }
    ),
    "deepspeed": frozenset({"llama", "qwen2", "qwen2_moe", "qwen3"}),
}
_IN_MEGATRON = frozenset({"llama", "qwen2", "qwen3"})
_GGUF = ("llama", "mistral", "qwen2", "qwen3")

LACKS = {
    "native": "its cache does not fit the native engine; train on given texts, or use a server",
    "exact": "its forward has an operation whose bits depend on the rest of the batch",
    "fp8": "its layers have matrices that are no plain linear layers",
    "qlora": "bitsandbytes does not quantise its layers",
}
# why `model.exact` refuses, where more is known than LACKS tells
_INEXACT: dict[str, str] = {
    **dict.fromkeys(
        ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"),
        "it uses attention sinks, which exact attention does not know",
    ),
    **dict.fromkeys(
        ("llama4", "llama4_text"), "it attends in chunks, which exact attention does not know"
    ),
    **dict.fromkeys(
        (
            "axk1",
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe_lite",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        "its keys and values have different widths (latent attention), and exact attention knows"
        " equal ones only",
    ),
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "mamba",
            "mamba2",
            "nemotron_h",
        ),
        "it has Mamba layers, whose bits depend on the rest of the batch",
    ),
}
SERVED = "where the server knows the architecture; its log-probs are compared after every update"
NOT_TRIED = "not tried: when the model is loaded it is proved right, or refused"


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether something works with an architecture, and why or how that is known.

    yes: it was run. code: it follows from the code, and was not run with this architecture.
    """

    mark: Mark
    why: str = ""


@dataclass(frozen=True, slots=True)
class Support:
    """What is known of one architecture, or of one model of it."""

    name: str  # transformers' model_type
    verdict: Verdict
    reason: str | None  # why it is refused
    cells: Mapping[str, Cell]  # by COLUMNS

    @property
    def known_as(self) -> str | None:
        return KNOWN_AS.get(self.name) or KNOWN_AS.get(f"{self.name}_text")


def names() -> list[str]:
    """Every architecture of which something is known."""
    return sorted({*RIGHT, *KNOWN})


def table() -> Iterator[Support]:
    for name in names():
        yield support({"model_type": name})


def support(config: Mapping[str, Any]) -> Support:
    """What is known of a model with this config.json; `{"model_type": name}` asks for an
    architecture.
    """
    name = type_of(config)
    if (why := refusal(config)) is not None:
        return refused(name, why)
    if name not in RIGHT:
        return Support(name, "not tried", None, dict.fromkeys(COLUMNS, Cell("code", NOT_TRIED)))
    lacks = RIGHT[name]
    verdict: Verdict = "trains" if "native" in lacks else "right"
    return Support(name, verdict, None, _cells(name, lacks, config))


def refused(name: str, why: str) -> Support:
    return Support(name, "refused", why, dict.fromkeys(COLUMNS, Cell("no", why)))


def type_of(config: Mapping[str, Any]) -> str:
    """The architecture of a model, or of the text half of a multimodal one."""
    own = config.get("model_type")
    text = config.get("text_config")
    within = text.get("model_type") if isinstance(text, Mapping) else None
    known = [str(name) for name in (own, within) if name in RIGHT or name in KNOWN]
    return known[0] if known else str(own or within or "unknown")


def _cells(name: str, lacks: tuple[str, ...], config: Mapping[str, Any]) -> dict[str, Cell]:
    cells = dict.fromkeys(COLUMNS, Cell("yes"))
    ran_as = _TEXT_HALF.get(name, name)
    for server, facts in SERVERS.items():
        how = SERVED if facts.run_with else f"{SERVED}; run against a stub only"
        cells[server] = Cell("yes" if ran_as in facts.run_with else "code", how)
    for backend, run_with in _ON_RANKS.items():
        cells[backend] = Cell("yes" if ran_as in run_with else "code")
    cells["megatron"] = _megatron(name, config)
    cells["gguf"] = (
        Cell("yes") if name in _GGUF else Cell("no", "llama.cpp's own converter knows more models")
    )
    if name == "gpt_oss":
        cells["qlora"] = Cell("yes", "of plain weights; MXFP4, as it is published, is refused")
    method = config.get("quantization_config")
    if isinstance(method, Mapping) and method.get("quant_method") == "mxfp4":
        cells["qlora"] = Cell("no", "its weights are quantised already")
    reasons = LACKS | ({"exact": _INEXACT[name]} if name in _INEXACT else {})
    cells |= {feature: Cell("no", reasons[feature]) for feature in lacks}
    return cells


def _megatron(name: str, config: Mapping[str, Any]) -> Cell:
    why = megatron.unknown_in({**config, "model_type": name})
    if why is not None:
        return Cell("no", f"the model has {why}")
    return Cell("yes" if name in _IN_MEGATRON else "code")


# ---- names that people give ----

SHORTEST = 4  # letters of a name that another one is said to begin with
_HEADS = ("ForCausalLM", "LMHeadModel", "WithLMHead", "ForConditionalGeneration", "Decoder")
# classes whose name is not that of their model_type
_CLASSES = {
    "CohereCompassForCausalLM": "cohere_compass_text",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3nForCausalLM": "gemma3n_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "InklingForCausalLM": "inkling_text",
    "MiniMaxM3VLForCausalLM": "minimax_m3_vl_text",
    "ModernBertDecoderForCausalLM": "modernbert-decoder",
    "ReformerModelWithLMHead": "reformer",
    "XLMWithLMHeadModel": "xlm",
}


def named(name: str) -> str | None:
    """The model_type that somebody means: a model_type, the class of a checkpoint or a name that
    people know; None: there is none.

    >>> named("LlamaForCausalLM"), named("Qwen2-MoE"), named("lama")
    ('llama', 'qwen2_moe', None)
    >>> named("SmolLM2"), named("phi-4"), named("Granite-4"), named("DeepSeek-R1")
    ('llama', 'phi3', 'granitemoehybrid', 'deepseek_v3')
    >>> named("Hunyuan-A13B"), named("GLM-4.5-Air"), named("QwQ")
    ('hunyuan_v1_moe', 'glm4_moe', 'qwen2')
    >>> named("Qwen3.5"), named("Llama 4"), named("qwen3_5")
    ('qwen3_5_text', 'llama4_text', 'qwen3_5')
    """
    every = names()
    if name in every:
        return name
    if name in _CLASSES:
        return _CLASSES[name]
    bare = name
    for head in _HEADS:
        bare = bare.removesuffix(head)
    types = {plain(each): each for each in every}
    people = {plain(one): each for each, calls in reversed(KNOWN_AS.items()) for one in _of(calls)}
    # a class is the name of a type; what people say is a model, whose text half is the row to show
    return (people | types if bare != name else types | people).get(plain(bare))


def beginning(name: str) -> str | None:
    """The longest name that people know a model by, or type of one, that this one begins with.

    >>> beginning("Llama-4-Scout"), beginning("Qwen3.5-35B-A3B"), beginning("unheard-of")
    ('llama4', 'qwen3_5_text', None)
    """
    mine = plain(name)
    found = [each for each in plain_names() if mine.startswith(each)]
    longest = max((each for each in found if len(each) >= SHORTEST), key=len, default=None)
    return None if longest is None else named(longest)


def plain_names() -> list[str]:
    """Types and what people call them, as `plain` has them."""
    calls = [plain(one) for known in KNOWN_AS.values() for one in _of(known)]
    return list(dict.fromkeys([*calls, *map(plain, names())]))


def also_known_so(name: str) -> list[str]:
    """Other types of models that people call by the same name.

    >>> also_known_so("qwen3_5_text"), also_known_so("mixtral")
    (['qwen3_5', 'qwen3_5_moe', 'qwen3_5_moe_text'], [])
    """
    mine = set(_of(support({"model_type": name}).known_as or ""))
    return [
        each.name for each in table() if each.name != name and mine & set(_of(each.known_as or ""))
    ]


def _of(calls: str) -> list[str]:
    """
    >>> _of("Llama 2, 3.x; SmolLM2")
    ['Llama 2', '3.x', 'SmolLM2']
    """
    return [one.strip() for one in calls.replace(";", ",").split(",") if one.strip()]


def plain(name: str) -> str:
    """
    >>> plain("Qwen3_5-MoE")
    'qwen35moe'
    """
    return "".join(letter for letter in name.lower() if letter.isalnum())
