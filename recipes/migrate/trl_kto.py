# KTO on answers that were judged good or bad. The settings are TRL's defaults.
import reinforge

model = "Qwen/Qwen2-0.5B-Instruct"
more = ["train.schedule.kind=linear", "data.max_length=1024", "data.length=truncate"]
settings = dict(epochs=3, prompts_per_step=8, learning_rate=1e-6, overrides=more)
reinforge.train(model=model, data="trl-lib/kto-mix-14k", algorithm="kto", **settings)
