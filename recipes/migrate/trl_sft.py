# SFT on conversations. The settings are TRL's defaults.
import reinforge

more = ["train.schedule.kind=linear", "data.max_length=1024", "data.length=truncate"]
settings = dict(epochs=3, prompts_per_step=8, learning_rate=2e-5, overrides=more)
reinforge.train(model="Qwen/Qwen3-0.6B", data="trl-lib/Capybara", algorithm="sft", **settings)
