"""`train.backend: fsdp`: torch's FSDP2, with sequence and tensor parallelism."""
