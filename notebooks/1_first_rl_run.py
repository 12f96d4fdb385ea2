# %% [markdown]
# # A first RL run
#
# GRPO on a model of 0.1 M parameters, on a CPU, in about two minutes. Nothing is downloaded.

# %%
import random
from pathlib import Path

import reinforge
from reinforge.offline.starter_model import make_taught_model

# %% [markdown]
# ## A model and a task
#
# `make_taught_model` is `reinforge tiny`: a Llama that was shown sums, of which two in five forget
# the last number. It takes up to a minute, once.

# %%
model = Path("runs/tiny")
if not model.exists():
    print("making a small model, once ...")
    make_taught_model(model)

# %% [markdown]
# A row is a prompt and whatever columns the reward wants. Some rows are held out: the model is
# never trained on those.

# %%
digits = range(6)
rows = [
    {"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c)}
    for a in digits
    for b in digits
    for c in digits
]
random.Random(0).shuffle(rows)
held_out, rows = rows[:54], rows[54:]
rows[0]

# %% [markdown]
# What the model says before training:

# %%
for answer in reinforge.generate(model, held_out[:3], n=3, max_new_tokens=4):
    print(answer["prompt"], answer["completion"], "right is", answer["answer"])

# %% [markdown]
# ## Train
#
# In every step the model answers 32 prompts, each 8 times. The reward of an answer is 1 if it is
# right. Answers that are better than the others of their prompt become more likely, the others
# less likely.
#
# What is set most often has a name of its own; every other key of the configuration goes into
# `overrides`. Here: evaluate every 20 steps, four sampled answers to each held-out prompt.
#
# In a notebook the run shows itself: progress, curves, the newest samples with their rewards.

# %%
result = reinforge.train(
    model=model,
    data=rows,
    eval_data=held_out,
    rewards=["exact_number"],
    algorithm="grpo",
    steps=60,
    prompts_per_step=32,
    group_size=8,
    max_new_tokens=4,
    learning_rate=1e-3,
    overrides=["eval.every=20", "eval.temperature=1.0", "eval.samples=4"],
)

# %% [markdown]
# The loss of a policy gradient is about 0 all the time, and says nothing. Look at the reward, and
# at the accuracy on held-out rows.

# %%
result.history[["reward/mean", "eval/accuracy", "policy/entropy"]].iloc[::10]

# %% [markdown]
# ## What came out
#
# The directory of the run has the checkpoint, all metrics, samples and `report.html`. A directory
# is what `generate`, `chat` and `export` take.

# %%
for answer in reinforge.generate(result.run_dir, held_out[:3], n=3, max_new_tokens=4):
    print(answer["prompt"], answer["completion"], "right is", answer["answer"])

# %%
accuracy = result.history["eval/accuracy"].dropna()
assert accuracy.iloc[-1] > accuracy.iloc[0] + 0.1, "it learned little: give it more steps"
print(f"held-out accuracy: {accuracy.iloc[0]:.0%} before, {accuracy.iloc[-1]:.0%} after")

# %% [markdown]
# Next: [a reward of your own](2_own_reward.ipynb). With a GPU and a real model only the names
# change: `model="Qwen/Qwen2.5-0.5B-Instruct"`, more tokens, a smaller learning rate.
