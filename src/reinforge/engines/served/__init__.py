"""Engines that are servers of somebody else's (vLLM, SGLang) with the trainer's weights."""
