# %% [markdown]
# # A reward of your own
#
# A reward is a function: it gets the answers to a prompt and the columns of its row, and returns
# one number for each answer.

# %%
import random
from pathlib import Path

import reinforge
from reinforge.offline.starter_model import make_taught_model

model = Path("runs/tiny")
if not model.exists():
    make_taught_model(model)

# %%
rows = [
    {"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c)}
    for a in range(10)
    for b in range(10)
    for c in range(10)
]
random.Random(0).shuffle(rows)
held_out, rows = rows[:64], rows[64:]

# %% [markdown]
# Right or wrong is a sparse reward: a model that is never right learns nothing. Here an answer
# that is near gets a part of it.


# %%
def near(completions, answer, reach=5):
    """1 for the right number, less for one that is near; None where nobody knows what is right."""
    scores = []
    for text, right in zip(completions, answer):
        text = text.strip()
        if not right.isdecimal():
            scores.append(None)  # cannot be scored: not trained on, and counted
        elif not text.isdecimal():
            scores.append(0.0)
        else:
            scores.append(max(0.0, 1 - abs(int(text) - int(right)) / reach))
    return scores


# %% [markdown]
# ## Try it before a run does
#
# The model will find every hole in it.

# %%
tried = [{"prompt": "1+2+3=", "answer": "6"}] * 4 + [{"prompt": "?", "answer": "unknown"}]
completions = ["6", "5", "60", "six", "6"]
for text, score in zip(completions, reinforge.score([near], tried, completions)):
    print(repr(text), score)

# %% [markdown]
# ## Train with it
#
# Several rewards are added up, each with its weight. A weight of 0 measures and trains nothing: so
# we see how often the answer is exactly right.

# %%
result = reinforge.train(
    model=model,
    data=rows,
    eval_data=held_out,
    rewards=[(near, 1.0), ("exact_number", 0.0)],
    steps=40,
    prompts_per_step=16,
    group_size=8,
    max_new_tokens=4,
    learning_rate=1e-3,
    overrides=["eval.every=20", "eval.temperature=1.0", "eval.samples=4"],
)

# %% [markdown]
# Each reward has its own metrics.

# %%
columns = [name for name in result.history.columns if name.startswith(("reward/", "rewards/"))]
result.history[columns].tail(3).T

# %%
reward = result.history["eval/reward"].dropna()
assert reward.iloc[-1] > reward.iloc[0] + 0.04, reward
print(f"held-out reward: {reward.iloc[0]:.2f} before, {reward.iloc[-1]:.2f} after")

# %% [markdown]
# Next: [an environment with tools](3_own_environment.ipynb). More about rewards:
# [docs/howto-reward.md](../docs/howto-reward.md), [docs/rewards.md](../docs/rewards.md).
