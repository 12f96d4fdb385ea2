"""What all backends on several processes share: the processes, who stands where, how objects
travel, rank 0's side (`driver`) and that of every rank (`worker`).
"""
