# %% [markdown]
# # A run that does not learn, and how to find out why
#
# Three runs of the same task: one with a mistake in its reward, one with a wrong setting, one that
# learns. The doctor looks at every run while it goes, and says what is wrong first.

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
    {"prompt": f"{a}+{b}+{c}=", "answer": a + b + c}
    for a in range(6)
    for b in range(6)
    for c in range(6)
]
random.Random(0).shuffle(rows)
settings = dict(model=model, data=rows, prompts_per_step=32, group_size=8, max_new_tokens=4)

# %% [markdown]
# ## A reward with a mistake


# %%
def right(completions, answer):
    return [float(text.strip() == want) for text, want in zip(completions, answer)]


first = reinforge.train(**settings, rewards=[right], steps=8, learning_rate=1e-3)

# %% [markdown]
# The loss is about 0, but that is so in every run with a policy gradient. What counts is that the
# reward is 0 in every step. The run said so under its bar; the whole diagnosis:

# %%
print(first.diagnosis())

# %% [markdown]
# `constant_reward`, with samples: some of those answers are right, and got 0. So it is the reward.
# Ask it about an answer that must be right:

# %%
reinforge.score([right], rows[:1], [str(rows[0]["answer"])])

# %% [markdown]
# The column `answer` is a number, and a text never equals it. `reinforge check rewards CONFIG`
# finds such things before a run does.


# %%
def right(completions, answer):
    return [float(text.strip() == str(want)) for text, want in zip(completions, answer)]


reinforge.score([right], rows[:1], [str(rows[0]["answer"])])

# %% [markdown]
# ## A learning rate that is too high

# %%
second = reinforge.train(**settings, rewards=[right], steps=16, learning_rate=0.03)

# %% [markdown]
# The reward was there in the first step, and then it was gone: one update was enough to lose the
# policy, and where every answer gets 0 there is no gradient that could bring it back. The doctor
# says since when, and a value to try.

# %%
print(second.diagnosis())

# %% [markdown]
# ## The same with a learning rate that is right

# %%
third = reinforge.train(**settings, rewards=[right], steps=40, learning_rate=1e-3)

# %%
print(third.diagnosis())

# %%
assert "First cause: constant_reward" in first.diagnosis()
assert "Lower train.learning_rate" in second.diagnosis()
assert "Is it learning? Yes." in third.diagnosis()

# %% [markdown]
# All rules, and what to turn for each: [docs/doctor.md](../docs/doctor.md). By symptom:
# [docs/troubleshooting.md](../docs/troubleshooting.md). How one number came about: `reinforge runs
# why RUN --step 3`.
