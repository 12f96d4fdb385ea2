"""What keys of other libraries become: numbers, names, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reinforge.config.load import config_from_dict
from reinforge.core.errors import InputError
from reinforge.migrate.draft import Note
from reinforge.migrate.translate import Migration, migrate_file
from reinforge.migrate.write import report_of, yaml_of


def migrated(folder: Path, name: str, text: str, **options: Any) -> Migration:
    path = folder / name
    path.write_text(text)
    return migrate_file(path, **options)


def note(found: Migration, theirs: str) -> Note:
    return next(note for note in found.notes if note.theirs == theirs)


TRL = "dataset_name: o/d\nmodel_name_or_path: o/m\n"
ACTOR = "actor_rollout_ref.actor"
GRPO = (
    "python -m verl.trainer.main_ppo data.train_files=gsm8k.parquet"
    " actor_rollout_ref.model.path=o/m actor_rollout_ref.rollout.n=8"
    " algorithm.adv_estimator=grpo trainer.n_gpus_per_node=1"
)


def test_batches_of_trl_are_counted_over_all_devices(tmp_path: Path) -> None:
    text = f"{TRL}per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n"
    sft = migrated(tmp_path, "sft.yaml", text, devices=2)
    assert sft.config["train"]["prompts_per_step"] == 64
    assert "4 a device x 8 accumulated x 2 devices" in note(sft, "gradient_accumulation_steps").says
    # 4 x 2 devices x 16 steps = 128 completions a generation, 16 of a prompt, in updates of 64
    grpo = migrated(
        tmp_path, "grpo.yaml", f"{text}num_generations: 16\nsteps_per_generation: 16\n", devices=2
    )
    assert grpo.config["train"]["prompts_per_step"] == 8
    assert grpo.config["algorithm"]["minibatches"] == 2


@pytest.mark.parametrize(
    ("optim", "ours"),
    [
        ("adamw_torch_fused", {}),
        ("paged_adamw_32bit", {"offload": True}),
        ("adamw_bnb_8bit", {"name": "adamw_8bit"}),
        ("paged_adamw_8bit", {"name": "adamw_8bit"}),
        ("lion_32bit", {"name": "lion", "options": {"betas": [0.9, 0.95]}}),
        ("paged_lion_32bit", {"name": "lion", "offload": True, "options": {"betas": [0.9, 0.95]}}),
        ("adafactor", {"name": "adafactor"}),
        ("sgd", {"name": "torch.optim:SGD"}),
        ("grokadamw", {}),
    ],
)
def test_optimizers_of_transformers(tmp_path: Path, optim: str, ours: dict[str, Any]) -> None:
    """Its betas of Adam are Lion's too; what an optimizer does not read is left out."""
    text = f"{TRL}optim: {optim}\nadam_beta2: 0.95\nadam_epsilon: 1.0e-6\n"
    found = migrated(tmp_path, "sft.yaml", text)
    reads = ours.get("name", "adamw").startswith("adamw")
    of_adam = {"betas": [0.9, 0.95], "eps": 1e-6} if reads else {}
    assert found.config["train"]["optimizer"] == {**of_adam, **ours}
    config_from_dict(found.config)
    assert (note(found, "optim").state == "missing") == (optim == "grokadamw")


def test_a_share_of_steps_that_are_not_told_stays_a_share(tmp_path: Path) -> None:
    found = migrated(tmp_path, "sft.yaml", f"{TRL}warmup_ratio: 0.1\nnum_train_epochs: 2\n")
    assert found.config["train"]["schedule"]["warmup"] == 0.1


def test_steps_of_trl_are_optimizer_steps(tmp_path: Path) -> None:
    """100 of them, 2 of a generation and 3 passes over it, are 17 batches."""
    text = (
        f"{TRL}max_steps: 100\nnum_iterations: 3\nwarmup_ratio: 0.1\n"
        "per_device_train_batch_size: 8\nsteps_per_generation: 2\nnum_generations: 8\n"
    )
    found = migrated(tmp_path, "grpo.yaml", text)
    assert found.config["train"]["steps"] == 17
    assert found.config["algorithm"]["epochs"] == 3
    assert found.config["train"]["schedule"]["warmup"] == 11  # 0.1 x 17 x 6 optimizer steps


@pytest.mark.parametrize(
    ("loss", "name", "reduce"),
    [
        ("dapo", "grpo", "token_mean"),
        ("grpo", "grpo", "sequence_mean"),
        ("dr_grpo", "grpo", "fixed_length"),
        ("cispo", "cispo", None),
    ],
)
def test_losses_of_trl(tmp_path: Path, loss: str, name: str, reduce: str | None) -> None:
    text = f"{TRL}num_generations: 8\nloss_type: {loss}\nepsilon_high: 4\n"
    algorithm = migrated(tmp_path, "grpo.yaml", text).config["algorithm"]
    assert algorithm["name"] == name and algorithm.get("reduce") == reduce
    if name == "cispo":  # TRL's epsilon_high is the bound itself
        assert algorithm["options"]["cap"] == 4 and "clip" not in algorithm


def test_minibatches_and_kl_of_verl(tmp_path: Path) -> None:
    text = (
        f"{GRPO} data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256"
        " actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01"
        " actor_rollout_ref.actor.kl_loss_type=mse algorithm.kl_ctrl.kl_coef=0.5"
    )
    found = migrated(tmp_path, "run.sh", text)
    algorithm = found.config["algorithm"]
    assert algorithm["minibatches"] == 4 and algorithm["group_size"] == 8
    assert algorithm["kl"] == {
        "coefficient": 0.01, "placement": "loss", "importance": False, "estimator": "k2",
    }  # fmt: skip
    # it counts in the reward only, which is off
    assert note(found, "algorithm.kl_ctrl.kl_coef").state == "nothing"


def test_experts_of_verl(tmp_path: Path) -> None:
    """Replay of what was sampled has one name here; SGLang is not asked for it; Megatron's layers
    are dense.
    """
    config = f"{ACTOR}.megatron.override_transformer_config"
    text = (
        f"{GRPO} {ACTOR}.strategy=megatron {ACTOR}.router_replay.mode=R3"
        " actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        f" +{config}.moe_router_bias_update_rate=0.001 +{config}.moe_aux_loss_coeff=0.01"
    )
    served = migrated(tmp_path, "run.sh", f"{text} actor_rollout_ref.rollout.name=vllm")
    assert served.config["train"]["router_replay"] == "on"
    other = migrated(tmp_path, "run.sh", f"{text} actor_rollout_ref.rollout.name=sglang")
    assert "router_replay" not in other.config["train"]
    assert "not asked where its tokens went" in note(other, f"{ACTOR}.router_replay.mode").says
    own = migrated(tmp_path, "run.sh", f"{text} actor_rollout_ref.rollout.name=hf")
    train = own.config["train"]
    assert train["router_replay"] == "on" and train["router_bias_rate"] == 0.001
    assert train["backend"] == "fsdp" and "router_aux_loss" not in train
    assert "times layers" in note(own, f"{config}.moe_aux_loss_coeff").says
    older = migrated(tmp_path, "run.sh", text.replace("mode=R3", "mode=R2"))
    found = note(older, f"{ACTOR}.router_replay.mode")
    assert found.state == "missing" and "R2 is not there" in found.says


def test_replay_of_nemo_rl(tmp_path: Path) -> None:
    text = (
        "policy:\n  model_name: o/m\n  router_replay: {enabled: true}\n"
        "  megatron_cfg: {enabled: false, moe_router_bias_update_rate: 0.001}\n"
        "  generation: {backend: hf, max_new_tokens: 8}\n"
        "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 3}\n"
        "data: {dataset_name: gsm8k}\n"
    )
    found = migrated(tmp_path, "grpo.yaml", text)
    assert found.config["train"]["router_replay"] == "on"
    # a number that its files have for dense models too
    assert "router_bias_rate" not in found.config["train"]
    off = migrated(tmp_path, "grpo.yaml", text.replace("enabled: true", "enabled: false"))
    assert off.config["train"].get("router_replay", "off") == "off"


def test_kl_of_verl_in_the_reward(tmp_path: Path) -> None:
    text = f"{GRPO} algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.005"
    kl = migrated(tmp_path, "run.sh", text).config["algorithm"]["kl"]
    assert kl == {"coefficient": 0.005, "placement": "reward", "estimator": "k1"}


def test_defaults_of_verl_are_written_where_ours_are_others(tmp_path: Path) -> None:
    found = migrated(tmp_path, "run.sh", GRPO)
    algorithm = found.config["algorithm"]
    assert algorithm["reduce"] == "token_mean" and algorithm["clip"]["dual"] == 3.0
    assert found.config["train"]["optimizer"]["weight_decay"] == 0.01
    assert found.defaults["algorithm.reduce"] == "actor_rollout_ref.actor.loss_agg_mode"


def test_cispo_of_verl_has_one_added_to_its_bound(tmp_path: Path) -> None:
    text = f"{GRPO} {ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_high=0.2"
    algorithm = migrated(tmp_path, "run.sh", text).config["algorithm"]
    assert (algorithm["name"], algorithm["options"]) == ("cispo", {"cap": 1.2})


def test_openrlhf_by_its_old_and_new_names(tmp_path: Path) -> None:
    new = (
        "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path o/m"
        " --data.prompt_dataset o/d"
        " --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256"
        " --algo.advantage.estimator group_norm --algo.kl.init_coef 0.001"
        " --reward.remote_url http://h:1/x"
        " --data.max_len 2048 --rollout.max_new_tokens 1536 --ds.zero_stage 3"
    )
    old = (
        "python -m openrlhf.cli.train_ppo_ray --pretrain o/m --prompt_data o/d"
        " --rollout_batch_size 128"
        " --n_samples_per_prompt 8 --train_batch_size 256 --advantage_estimator group_norm"
        " --init_kl_coef 0.001 --remote_rm_url http://h:1/x --max_len 2048 --generate_max_len 1536"
        " --zero_stage 3"
    )
    first = migrated(tmp_path, "new.sh", new)
    second = migrated(tmp_path, "old.sh", old)
    assert {**first.config, "run": {}} == {**second.config, "run": {}}
    config = first.config
    assert config["algorithm"]["minibatches"] == 4  # 128 x 8 / 256
    assert config["algorithm"]["kl"] == {"coefficient": 0.001, "placement": "reward"}
    assert config["data"]["max_length"] == 512
    assert config["train"]["deepspeed"] == {"stage": 3}


def test_llamafactory_reads_its_register(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    register = '{"mine": {"file_name": "rows/mine.json"}, "hub": {"hf_hub_url": "org/rows"}}'
    (tmp_path / "data/dataset_info.json").write_text(register)
    text = "stage: sft\nmodel_name_or_path: o/m\ndataset: mine,hub\nmax_samples: 50\n"
    data = migrated(tmp_path, "a.yaml", text).config["data"]
    assert data["mixture"] == [
        {"source": "data/rows/mine.json", "limit": 50},
        {"source": "org/rows", "limit": 50},
    ]
    assert (data["max_length"], data["length"]) == (2048, "truncate")


def test_nemo_rl_reads_the_files_that_its_defaults_name(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "policy: {model_name: o/m, train_global_batch_size: 64}\n"
        "grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 8, max_num_steps: 10}\n"
        "data: {train: {dataset_name: gsm8k}}\n"
    )
    text = "defaults: base.yaml\ngrpo: {num_prompts_per_step: 32}\n"
    text += "loss_fn: {token_level_loss: false}\n"
    config = migrated(tmp_path, "a.yaml", text).config
    assert config["train"]["prompts_per_step"] == 32
    assert config["algorithm"]["minibatches"] == 4
    assert config["algorithm"]["reduce"] == "sequence_mean"
    assert config["data"]["source"] == "openai/gsm8k"
    assert config["rewards"] == [{"name": "exact_number"}]


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    found = migrated(tmp_path, "run.sh", f"{GRPO} trainer.quite_new=1")
    assert note(found, "trainer.quite_new").state == "unknown"
    assert found.share < 1
    assert "  trainer.quite_new = 1" in list(report_of(found))


def test_what_our_rules_refuse_is_left_out_with_their_words(tmp_path: Path) -> None:
    text = f"{TRL}use_peft: true\nlora_r: 8\nlora_dropout: 0.1\nnum_generations: 8\n"
    found = migrated(tmp_path, "grpo.yaml", text)
    assert "dropout" not in found.config["adapter"]
    assert note(found, "lora_dropout").state == "missing"
    assert "sampled without dropout" in note(found, "lora_dropout").says
    config_from_dict(found.config)


def test_the_yaml_is_what_the_configuration_is(tmp_path: Path) -> None:
    from reinforge.config.load import load_config

    found = migrated(tmp_path, "run.sh", GRPO)
    (tmp_path / "ours.yaml").write_text(yaml_of(found))
    assert load_config(tmp_path / "ours.yaml") == config_from_dict(found.config)


def test_a_script_of_trl_names_its_own_reward(tmp_path: Path) -> None:
    text = (
        "from trl import GRPOConfig, GRPOTrainer\nfrom datasets import load_dataset\n"
        "def good(completions, **_):\n    return [1.0] * len(completions)\n"
        "t = GRPOTrainer(model='o/m', reward_funcs=good, train_dataset=load_dataset('o/d'),"
        " args=GRPOConfig(learning_rate=1e-6))\nt.train()\n"
    )
    found = migrated(tmp_path, "train.py", text)
    assert found.config["rewards"] == [{"name": f"{tmp_path / 'train.py'}:good", "kind": "trl"}]
    assert any("trains when it is imported" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "x: 1\n", "no library is recognised"),
        ("a.sh", "echo hello\n", "no library is recognised"),
        ("a.py", "print(1)\n", "makes no trainer of TRL"),
        ("a.yaml", "- 1\n", "no mapping"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        migrated(tmp_path, name, text)


def test_a_library_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no library 'tlr'"):
        migrated(tmp_path, "a.yaml", "x: 1\n", library="tlr")


def test_a_loss_that_is_not_there_is_told(tmp_path: Path) -> None:
    text = "stage: dpo\nmodel_name_or_path: o/m\ndataset: a.json\npref_loss: brand_new\n"
    found = migrated(tmp_path, "a.yaml", text)
    assert found.config["algorithm"]["name"] == "dpo"
    assert note(found, "pref_loss").says == "brand_new is not there; dpo is written"
