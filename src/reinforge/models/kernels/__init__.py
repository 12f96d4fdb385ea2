"""Triton kernels for a GPU. Each has a plain-torch twin that defines its result, and CI runs them
in Triton's interpreter. They are imported where a GPU is at work.

`layer`: what a decoder layer does with one new token per sequence; `paged_attention`: its
attention; `fp8`: numbers in FP8; `draw`: the next token; `head`: log-probs of given tokens, and
their gradient; `exact`, `exact_layer` and `exact_product`: `model.exact`.
"""
