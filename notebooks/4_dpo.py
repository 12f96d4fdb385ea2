# %% [markdown]
# # DPO from preferences
#
# Pairs of answers of which one is better. No reward function, no sampling while training.

# %%
import random
from pathlib import Path

import reinforge
from reinforge.offline.starter_model import make_taught_model

model = Path("runs/tiny")
if not model.exists():
    make_taught_model(model)

# %% [markdown]
# ## Preferences
#
# The model often forgets the last number of a sum. So the right answer is `chosen`, and the one
# that forgets it is `rejected`. With real data these are rows of a file or of the hub with the
# same columns.

# %%
sums = [(a, b, c) for a in range(6) for b in range(6) for c in range(1, 6)]
random.Random(0).shuffle(sums)
rows = [
    {"prompt": f"{a}+{b}+{c}=", "chosen": str(a + b + c), "rejected": str(a + b)}
    for a, b, c in sums
]
held_out, rows = rows[:40], rows[40:]
rows[:2]


# %%
def accuracy(model):
    """How often a sampled answer to a held-out sum is right."""
    prompts = [{"prompt": row["prompt"], "right": row["chosen"]} for row in held_out]
    answers = reinforge.generate(model, prompts, n=8, max_new_tokens=4)
    return sum(a["completion"].strip() == a["right"] for a in answers) / len(answers)


before = accuracy(model)
before

# %% [markdown]
# ## DPO
#
# At step 0 the policy is the reference: the loss is ln 2 = 0.693 and the margin 0. Then the margin
# between chosen and rejected answers grows.

# %%
settings = dict(
    model=model,
    data=rows,
    eval_data=held_out,
    steps=60,
    prompts_per_step=32,
    learning_rate=1e-3,
    overrides=["eval.every=20"],
)
dpo = reinforge.train(**settings, algorithm="dpo")

# %% [markdown]
# Every held-out pair is ranked right (`eval/accuracy`). But is the right answer said more often?

# %%
columns = ["eval/accuracy", "eval/margin", "eval/chosen", "eval/rejected"]
dpo.history[columns].dropna()

# %%
after_dpo = accuracy(dpo.run_dir)
print(f"right answers: {before:.0%} before, {after_dpo:.0%} after DPO")

# %% [markdown]
# `eval/chosen` is negative: chosen answers became **less** likely too, only less so than rejected
# ones. The loss looks at the difference alone; what was taken from both went to other answers.
# This is known of DPO, and the reason to watch `rewards/chosen`, not the margin only.
#
# ## RPO: DPO with an anchor
#
# `rpo` adds the negative log-likelihood of the chosen answer to the loss.

# %%
rpo = reinforge.train(**settings, algorithm="rpo")

# %%
rpo.history[columns].dropna()

# %%
after_rpo = accuracy(rpo.run_dir)
assert dpo.metrics["eval/accuracy"] > 0.9 and dpo.metrics["eval/chosen"] < 0
assert rpo.metrics["eval/accuracy"] > 0.9 and rpo.metrics["eval/chosen"] > 0
assert after_rpo > before + 0.1, (before, after_rpo)
print(f"right answers: {before:.0%} before, {after_dpo:.0%} after DPO, {after_rpo:.0%} after RPO")

# %% [markdown]
# Next: [distillation](5_distillation.ipynb). All losses over pairs, and what each is called
# elsewhere: [docs/preference.md](../docs/preference.md).
