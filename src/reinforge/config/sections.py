"""All sections of a configuration in one model, not yet checked against each other.

`schema.Config` is this with the checks; the rules read it.
"""

from __future__ import annotations

from reinforge.config.adapter import AdapterConfig
from reinforge.config.agent import AgentConfig
from reinforge.config.algorithm import AlgorithmConfig
from reinforge.config.base import Section
from reinforge.config.cluster import ClusterConfig
from reinforge.config.critic import CriticConfig
from reinforge.config.data import DataConfig
from reinforge.config.engine import EngineConfig
from reinforge.config.env import EnvConfig
from reinforge.config.eval import EvalConfig
from reinforge.config.model import ModelConfig
from reinforge.config.ptx import PTXConfig
from reinforge.config.rewards import RewardConfig
from reinforge.config.rollout import RolloutConfig
from reinforge.config.run import RunConfig
from reinforge.config.sampling import SamplingConfig
from reinforge.config.teacher import TeacherConfig
from reinforge.config.train import TrainConfig


class Sections(Section):
    model: ModelConfig
    adapter: AdapterConfig | None = None
    algorithm: AlgorithmConfig
    data: DataConfig
    rewards: list[RewardConfig] = []
    env: EnvConfig | None = None
    agent: AgentConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    train: TrainConfig
    critic: CriticConfig | None = None
    teacher: TeacherConfig | None = None
    ptx: PTXConfig | None = None
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    run: RunConfig
