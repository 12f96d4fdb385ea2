"""How many logits are in memory at once: the head (`models.head`) computes by it, the memory of a
run (`backends.memory_model`) is foretold by it.
"""

# of one chunk of rows: about 8 MB of float32 on a CPU (stays near the cache), 1 GB on a GPU (fills
# it)
CHUNK_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 21}
# of what a GPU has left, for logits that stay from the forward to the backward
KEPT_SHARE = 0.25


def stay(size: int, left: int) -> bool:
    """Whether logits of `size` bytes stay where a GPU has `left` bytes free beside them."""
    return size <= KEPT_SHARE * left
