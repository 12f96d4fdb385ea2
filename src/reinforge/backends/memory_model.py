"""How much memory training and generation take, part by part, from the numbers in a model's
configuration.

Imports no torch: `plan` asks before anything is loaded. Checked against peaks measured on an H200
(tests/unit/backends/test_memory_model.py).

Legend: N packed tokens, L layers, H hidden, I inner size of the MLP, Q = heads x head size, K =
key/value heads x head size, V vocabulary, b bytes per element of the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLOAT = 4
GIB = 2**30
HEAD_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 21}  # logits of one chunk: models/head.py
# a KV cache of at most this share of the GPU stays while training: engines/native/engine.py
KEEP = 1 / 12
PREFILL_TOKENS = 16384  # packed prompt tokens per forward of the engine
# torch and transformers in the memory of a process; a GPU's allocator does not count them
LIBRARIES = int(0.4 * GIB)
# of what is left for activations; the rest is fragmentation and what the model below does not see
SHARE = 0.85
# tokens per micro-batch; past FAR_ENOUGH more is not faster
CPU_BUDGET = 4096
LEAST = 1024
MOST = 131072
FAR_ENOUGH = 24576
# MLPs of two matrices
UNGATED = {"gpt2", "opt", "gpt_neox", "gptj", "gpt_neo", "bloom", "falcon", "phi", "codegen", "mpt"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the memory of a model depends on.

    `weights` and `trained` are counted parameters; without them they are computed.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    itemsize: int = 2
    rank: int | None = None  # of an adapter; None: all weights are trained
    targets: tuple[str, ...] | None = None  # modules with an adapter; None: all linear ones
    checkpointing: bool = False
    compiled: bool = False
    offload: bool = False  # masters and moments in host memory
    gated: bool = True
    experts: int = 1
    active: int = 1  # experts per token
    weights: int | None = None
    trained: int | None = None

    @classmethod
    def of(cls, config: Any, **more: Any) -> ModelFacts:
        """From a transformers configuration (of the text model).

        `more` are the fields that it does not know.
        """

        def first(*names: str) -> int | None:
            return next(
                (
                    int(value)
                    for name in names
                    if isinstance(value := getattr(config, name, None), int) and value
                ),
                None,
            )

        hidden = first("hidden_size") or 1
        heads = first("num_attention_heads") or 1
        experts = first("num_local_experts", "num_experts", "n_routed_experts") or 1
        inner = (
            (first("moe_intermediate_size") if experts > 1 else None)
            or first("intermediate_size", "ffn_dim", "n_inner")
            or 4 * hidden
        )
        found = {
            "layers": first("num_hidden_layers") or 1,
            "hidden": hidden,
            "inner": inner,
            "heads": heads,
            "kv_heads": first("num_key_value_heads") or heads,
            "head_dim": first("head_dim") or hidden // heads,
            "vocab": first("vocab_size") or 1,
            "tied": bool(getattr(config, "tie_word_embeddings", False)),
            "experts": experts,
            "active": first("num_experts_per_tok") or 1,
            "gated": getattr(config, "model_type", "") not in UNGATED,
        }
        return cls(**{**found, **more})

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """(inputs, outputs, how many) of each matrix of a layer.

        Architectures with other names have matrices of these sizes.
        """
        mlp = {
            "up_proj": (self.hidden, self.inner, self.experts),
            "down_proj": (self.inner, self.hidden, self.experts),
        }
        return {
            "q_proj": (self.hidden, self.query, 1),
            "k_proj": (self.hidden, self.key, 1),
            "v_proj": (self.hidden, self.key, 1),
            "o_proj": (self.query, self.hidden, 1),
            **({"gate_proj": mlp["up_proj"]} if self.gated else {}),
            **mlp,
        }

    def body(self, active: bool = False) -> int:
        """Parameters of the layers; `active`: those that one token meets."""
        return self.layers * sum(
            a * b * (min(n, self.active) if active else n) for a, b, n in self.linears().values()
        )

    def parameters(self) -> int:
        return (
            self.weights
            or self.body()
            + (1 if self.tied else 2) * self.vocab * self.hidden
            + (2 * self.layers + 1) * self.hidden
        )

    def learning(self) -> int:
        """Parameters that the optimizer sees."""
        if self.trained is not None or self.rank is None:
            return self.parameters() if self.trained is None else self.trained
        adapted = [
            size
            for name, size in self.linears().items()
            if self.targets is None or name in self.targets
        ]
        return self.layers * self.rank * sum((a + b) * n for a, b, n in adapted)

    @property
    def masters(self) -> bool:
        """Whether what is trained needs a float32 copy: adapters are float32 themselves."""
        return self.itemsize < FLOAT and self.rank is None


def weight_bytes(f: ModelFacts) -> int:
    return f.parameters() * f.itemsize + (f.learning() * FLOAT if f.rank is not None else 0)


def optimizer_bytes(f: ModelFacts) -> int:
    """Two moments, and the masters. On the device nothing of it with offload."""
    return 0 if f.offload else f.learning() * FLOAT * (3 if f.masters else 2)


def gradient_bytes(f: ModelFacts) -> int:
    """Sums in float32, and the largest gradient as it comes out of the backward, before it is added
    (the embedding's).
    """
    return f.learning() * FLOAT + (f.vocab * f.hidden * f.itemsize if f.masters else 0)


def critic_bytes(f: ModelFacts) -> int:
    """Another model of the same shape with its own optimizer."""
    return weight_bytes(f) + optimizer_bytes(f) + gradient_bytes(f)


def head_bytes(f: ModelFacts, tokens: int, device: str = "cuda") -> int:
    """One chunk of logits and of their gradient (on a CPU with five float32 copies), and the head's
    own gradient in float32 with the product that is added to it.
    """
    elements = min(tokens * f.vocab, HEAD_ELEMENTS[device])
    chunk = elements * (2 * f.itemsize if device == "cuda" else 2 * f.itemsize + 5 * FLOAT)
    return chunk + (f.vocab * f.hidden * (FLOAT + f.itemsize) if f.rank is None else 0)


def saved(f: ModelFacts) -> dict[str, int]:
    """Bytes that one decoder layer keeps of one token for its backward pass, tensor by tensor.

    Eager: RMSNorm keeps its input in float32 and, for the gradient of its weight, the normalised
    input; a matrix keeps its input; attention keeps q, k, v, its output and one float32 per head;
    silu keeps gate, the product keeps silu(gate) and up. Compiled: what is elementwise is computed
    again; left are the inputs of matrices, of norms and of attention. Adapters keep the inputs of
    the matrices, which the matrices share, and what is between their two factors.
    """
    b = f.itemsize
    h = f.hidden
    q = f.query
    k = f.key
    inner = f.inner * f.active
    attention = {
        "q": b * q,
        "k": b * k,
        "v": b * k,
        "attention": b * q,
        "attention_sums": FLOAT * f.heads,
    }
    gate = {"gate": b * inner, "activated": b * inner} if f.gated else {"activated": b * inner}
    if f.rank is not None:
        inputs = {"norm_outputs": 2 * b * h, "product": b * inner}
        return {
            "norms": 2 * FLOAT * h,
            **inputs,
            "ranks": 2 * b * f.rank * len(f.linears()),
            **attention,
            **gate,
            "up": b * inner,
        }
    if f.compiled:
        mlp = {"gate": b * inner} if f.gated else {}
        return {
            "inputs": 2 * b * h,
            "normalised": 2 * b * h,
            **attention,
            **mlp,
            "up": b * inner,
            "product": b * inner,
        }
    return {
        "norms": 2 * FLOAT * h,
        "normalised": 2 * b * h,
        "norm_outputs": 2 * b * h,
        **attention,
        **gate,
        "up": b * inner,
        "product": b * inner,
    }


def activation_bytes(f: ModelFacts) -> int:
    """Per packed token: all layers (with gradient checkpointing their inputs, and one layer in
    whole), and what is outside of them: embedding, final norm, rotary tables, the rows that the
    head reads and their gradient.
    """
    layer = sum(saved(f).values())
    layers = f.layers * f.hidden * f.itemsize + layer if f.checkpointing else f.layers * layer
    return layers + f.hidden * (5 * f.itemsize + FLOAT) + 4 * f.head_dim * FLOAT + 64


def backward_bytes(f: ModelFacts) -> int:
    """Per packed token: gradients inside the layer that the backward is in."""
    return f.itemsize * 4 * (f.inner * f.active + f.hidden)


def kv_token_bytes(f: ModelFacts) -> int:
    return 2 * f.layers * f.key * f.itemsize


def kv_pool_bytes(
    f: ModelFacts,
    free: int,
    max_batch: int,
    longest: int,
    kv_gib: float | None = None,
    block: int = 16,
) -> int:
    """What the native engine takes for its cache: as configured, or what the longest sequences
    need, at most 0.4 of what is free.
    """
    unit = kv_token_bytes(f) * block
    if kv_gib is not None:
        return max(8, int(kv_gib * GIB) // unit) * unit
    return min(max(8, int(0.4 * free) // unit), max(8, max_batch * -(-longest // block))) * unit


def training(
    f: ModelFacts,
    tokens: int,
    device: str = "cuda",
    *,
    reference: bool = False,
    critic: bool = False,
) -> dict[str, int]:
    """Bytes of each part at the peak of a training pass over micro-batches of `tokens`."""
    # one after the other, never both
    working = max(head_bytes(f, tokens, device), tokens * backward_bytes(f))
    return {
        "weights": weight_bytes(f),
        "optimizer": optimizer_bytes(f),
        "gradients": gradient_bytes(f),
        "activations": tokens * activation_bytes(f),
        "head": working,
        "reference": f.parameters() * f.itemsize if reference and f.rank is None else 0,
        "critic": critic_bytes(f) if critic else 0,
        **({"libraries": LIBRARIES} if device == "cpu" else {}),
    }


def generation(
    f: ModelFacts,
    kv: int,
    rows: int,
    device: str = "cuda",
    *,
    reference: bool = False,
    critic: bool = False,
) -> dict[str, int]:
    """Bytes of each part while `rows` sequences are decoded: no gradients, float32 logits of all
    rows a few times over.
    """
    still = {
        k: v
        for k, v in training(f, 0, device, reference=reference, critic=critic).items()
        if k not in ("gradients", "activations")
    }
    prefill = (
        PREFILL_TOKENS * f.itemsize * (4 * f.hidden + 3 * f.inner * f.active)
        if device == "cuda"
        else 0
    )
    return {**still, "head": 4 * FLOAT * rows * f.vocab, "prefill": prefill, "kv": kv}


def budget(
    f: ModelFacts,
    free: int,
    *,
    reference: bool = False,
    critic: bool = False,
    reserved: int = 0,
    longest: int = 0,
) -> int:
    """Packed tokens per micro-batch that fit a GPU with `free` bytes left beside the weights: SHARE
    of what remains after the optimizer, gradients, copies and the head's chunk; a multiple of 1024.
    Small models stop at FAR_ENOUGH unless a row is longer.
    """
    parts = training(f, MOST, reference=reference, critic=critic)
    left = (
        free
        - reserved
        - sum(parts[name] for name in ("optimizer", "gradients", "reference", "critic"))
        - head_bytes(f, MOST)
    )
    fits = int(SHARE * left / (activation_bytes(f) + backward_bytes(f))) // 1024 * 1024
    return max(LEAST, min(fits, MOST, max(FAR_ENOUGH, -(-longest // 1024) * 1024)))


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())
