"""The trainer's side of GPUs that are files (ledger_gpus.py), for ranks on CPUs."""

from __future__ import annotations

from helpers.ledger_gpus import WHOLE, note, taken
from reinforge.backends.distributed.ranks import RankMember
from reinforge.build.shared_gpus import TrainerGpu
from reinforge.core.gpu_room import GpuRoom


class LedgerGpu(TrainerGpu):
    """Rank i has GPU i."""

    @property
    def name(self) -> str:
        return str(self.rank)

    def release(self) -> GpuRoom:
        note(f"rank {self.rank} releases")
        return GpuRoom(self.rank, self.name, room(self.name))

    def hold(self, share: float, size: int = 0) -> None:
        note(f"rank {self.rank} holds {share:g}" + (f" and {size} bytes" if size else ""))


def ledger_gpu_of_rank(member: RankMember) -> LedgerGpu:
    return LedgerGpu(member.device, member.rank)


def room(gpu: str) -> int:
    return WHOLE - taken("server", gpu) - taken("trainer", gpu)
