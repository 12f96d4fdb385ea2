# DPO on pairs of answers. The settings are TRL's defaults.
import reinforge

data = "trl-lib/ultrafeedback_binarized"
more = ["train.schedule.kind=linear", "data.max_length=1024", "data.length=truncate"]
settings = dict(epochs=3, prompts_per_step=8, learning_rate=1e-6, overrides=more)
reinforge.train(model="Qwen/Qwen3-0.6B", data=data, algorithm="dpo", **settings)
