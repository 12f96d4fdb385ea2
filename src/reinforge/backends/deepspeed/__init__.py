"""`train.backend: deepspeed`: DeepSpeed's ZeRO, stages 2 and 3."""
