"""The whole configuration as frozen models.

Defaults are what we would choose; `None` means "the algorithm's own".

Unknown keys are refused. Every field has a description: the reference page and the JSON schema are
made from here.
"""

from __future__ import annotations

from pydantic import model_validator

from reinforge.config.ahead import check_ahead
from reinforge.config.deepspeed import check_deepspeed
from reinforge.config.engine import check_engine
from reinforge.config.megatron import check_megatron
from reinforge.config.parallel import check_parallel
from reinforge.config.sampling import SamplingConfig
from reinforge.config.sections import Sections


class Config(Sections):
    """One run: a model, an algorithm, data, and for RL the rewards."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        rl = self.algorithm.rl
        if (
            self.algorithm.kind.wants_rewards
            and not self.rewards
            and self.env is None
            and self.agent is None
        ):
            raise ValueError(
                f"rewards: algorithm {self.algorithm.name} needs at least one reward, an"
                " environment (env) or an agent"
            )
        if self.agent is not None and (self.env is not None or not rl):
            raise ValueError(
                "agent: not beside env"
                if rl
                else f"agent: {self.algorithm.name} samples nothing; remove it"
            )
        if rl and (self.rollout.top_p < 1 or self.rollout.top_k or self.rollout.min_p):
            raise ValueError(
                "rollout: top_p, top_k and min_p change the sampling distribution and would bias"
                " the policy gradient; set them under eval, or remove them"
            )
        if rl and self.algorithm.group_size == 1 and self.algorithm.compares_samples:
            what = (
                "every advantage would be 0"
                if self.algorithm.family == "policy_gradient"
                else "there is nothing to compare"
            )
            raise ValueError(
                f"algorithm.group_size: a group of 1 has no spread, {what}; use at least 2"
            )
        check_parallel(self)
        check_deepspeed(self)
        check_megatron(self)
        check_engine(self)
        self._check_family()
        self._check_online()
        self._check_sampling(rl)
        check_ahead(self)
        self._check_critic()
        return self

    def _check_family(self) -> None:
        """Keys that mean nothing to the algorithm's family are refused: they would be ignored."""
        algorithm = self.algorithm
        if foreign := algorithm.foreign_keys():
            hint = (
                "; the KL to a reference is algorithm.kl.coefficient"
                if foreign[0] == "beta"
                else ""
            )
            raise ValueError(
                f"algorithm.{foreign[0]}: {algorithm.name} ({algorithm.family}) does not read it;"
                f" remove it{hint}"
            )
        precomputed = self.train.precompute_reference
        if precomputed and (
            algorithm.family != "preference"
            or algorithm.kl.reference.kind != "frozen"
            or algorithm.kind.online
        ):
            changing = algorithm.kind.online
            why = (
                "compares with answers that change with the batch"
                if changing
                else "has no frozen reference"
            )
            raise ValueError(f"train.precompute_reference: {algorithm.name} {why}; remove it")
        if (algorithm.family == "distillation") != (self.teacher is not None):
            raise ValueError(
                f"teacher: {algorithm.name} "
                + (
                    "imitates nobody; remove the section"
                    if self.teacher
                    else "needs one; write e.g. `teacher: {path: org/name}`"
                )
            )
        if (
            self.teacher is not None
            and self.teacher.precompute
            and (not algorithm.spec.teacher_fits_disk or self.teacher.also)
        ):
            raise ValueError(
                "teacher.precompute: a whole distribution per token does not fit a disk; use"
                " algorithm topk with one teacher"
            )
        if self.train.neftune is not None and algorithm.family != "supervised":
            raise ValueError(
                f"train.neftune: noise is for supervised fine-tuning, not for {algorithm.name};"
                " remove it"
            )
        if self.train.router_aux_loss and algorithm.family == "reward":
            raise ValueError(
                "train.router_aux_loss: a reward model has no load-balancing loss; remove it"
            )
        if algorithm.family in ("preference", "reward") and self.data.loss_on == "all":
            raise ValueError(
                f"data.loss_on: {algorithm.name} needs to know which tokens are the answer; use"
                " assistant or completion"
            )
        if algorithm.family == "reward" and self.rewards:
            raise ValueError("rewards: a reward model generates nothing; remove the section")
        if (
            algorithm.family == "reward"
            and self.adapter is not None
            and (self.adapter.kind == "qlora" or self.adapter.path)
        ):
            key = "kind: qlora" if self.adapter.kind == "qlora" else "path"
            raise ValueError(
                f"adapter.{key}: a reward model is trained with a fresh lora, rslora or dora, or"
                " whole"
            )

    def _check_online(self) -> None:
        """Preferences over what is sampled."""
        algorithm = self.algorithm
        if algorithm.kind.opponent == "half" and algorithm.group_size % 2:
            raise ValueError(
                f"algorithm.group_size: half of the answers are the opponent's in {algorithm.name};"
                " use an even number"
            )
        if algorithm.kind.opponent != "none" and self.env is not None:
            raise ValueError(
                f"env: {algorithm.name} answers prompts with an opponent's words too, in one turn;"
                " use online_dpo"
            )
        if algorithm.kind.online and self.sampling.replay is not None:
            raise ValueError(
                f"sampling.replay: {algorithm.name} trains on fresh answers only; remove it"
            )
        if algorithm.kind.online and self.critic is not None:
            raise ValueError(f"critic: {algorithm.name} reads no values; remove the section")

    def _check_critic(self) -> None:
        algorithm = self.algorithm
        critic = self.critic
        if algorithm.needs_critic and critic is None:
            raise ValueError(
                f"critic: {algorithm.advantage or algorithm.name} needs the values of a critic; "
                "add `critic: {}` for one that starts from the policy's checkpoint"
            )
        if critic is None:
            return
        if not algorithm.may_have_critic:
            raise ValueError(
                f"critic: {algorithm.name} with this advantage reads no values; remove the section,"
                " or set algorithm.advantage: gae"
            )
        if self.train.steps is not None and critic.warmup >= self.train.steps:
            raise ValueError(
                f"critic.warmup: {critic.warmup} of {self.train.steps} steps leave none to train"
                " the policy; lower it"
            )

    def _check_sampling(self, rl: bool) -> None:
        """What the section `sampling` asks of the others."""
        if not rl and (
            self.sampling != SamplingConfig(curriculum=self.sampling.curriculum)
            or self.sampling.tracks
        ):
            raise ValueError(
                f"sampling: {self.algorithm.name} samples nothing; a curriculum by column or length"
                " is all that it can have"
            )
        replay = self.sampling.replay
        algorithm = self.algorithm
        if replay is None:
            return
        if replay.share * self.train.prompts_per_step < 1:
            raise ValueError(
                f"sampling.replay.share: {replay.share} of {self.train.prompts_per_step} prompts is"
                " less than one group; raise it"
            )
        without_ratio = algorithm.surrogate is not None and not algorithm.has_ratio
        if algorithm.correction.name == "none" and (without_ratio or algorithm.old == "recompute"):
            why = (
                f"the surrogate {algorithm.surrogate} has no ratio"
                if without_ratio
                else "algorithm.old: recompute leaves behaviour out"
            )
            raise ValueError(
                f"sampling.replay: replayed groups are off-policy and {why}; set"
                " algorithm.correction.name, e.g. to tis"
            )
