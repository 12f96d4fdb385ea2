"""`train.backend: megatron`: layers of megatron-core."""
