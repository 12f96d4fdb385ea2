# %% [markdown]
# # Distillation
#
# A student learns from a teacher what to say next, token by token. On-policy: the student writes,
# and the teacher says how likely it would have been to write that.

# %%
import random
from pathlib import Path

import reinforge
from reinforge.offline.export import export
from reinforge.offline.starter_model import make_taught_model

student = Path("runs/tiny")
if not student.exists():
    make_taught_model(student)

# %%
rows = [
    {"prompt": f"{a}+{b}+{c}=", "answer": str(a + b + c)}
    for a in range(6)
    for b in range(6)
    for c in range(6)
]
random.Random(0).shuffle(rows)


def accuracy(model):
    """How often a sampled answer is right."""
    answers = reinforge.generate(model, rows[:72], n=4, max_new_tokens=4)
    return sum(a["completion"].strip() == a["answer"] for a in answers) / len(answers)


# %% [markdown]
# ## A teacher
#
# Usually a larger model. Here: the same model after SFT on right sums.

# %%
taught = reinforge.train(
    model=student,
    data=[{"prompt": row["prompt"], "completion": row["answer"]} for row in rows],
    algorithm="sft",
    steps=100,
    prompts_per_step=64,
    learning_rate=3e-3,
    # to see the same rows thirty times is what is wanted here
    overrides=["train.schedule.kind=cosine", "run.doctor.repeated_data=off"],
)
teacher = Path("runs/teacher")
if not teacher.exists():
    export(taught.run_dir, teacher)
before, best = accuracy(student), accuracy(teacher)
print(f"right answers: student {before:.0%}, teacher {best:.0%}")

# %% [markdown]
# ## On-policy distillation
#
# `opd` is a policy gradient whose advantage is, for every token, log p of the teacher minus log p
# of the student. A teacher's opinion of each token says more than one reward at the end. Right
# answers are not needed: the reward below is measured, and nothing is trained on it.

# %%
result = reinforge.train(
    model=student,
    data=rows,
    algorithm="opd",
    rewards=["exact_number"],
    steps=40,
    prompts_per_step=32,
    group_size=4,
    max_new_tokens=4,
    learning_rate=1e-3,
    overrides=[f"teacher.path={teacher}"],
)

# %%
after = accuracy(result.run_dir)
assert after > before + 0.08, (before, after)
print(f"right answers: student {before:.0%} before, {after:.0%} after, teacher {best:.0%}")

# %% [markdown]
# Next: [a run that does not learn](6_not_learning.ipynb). Other divergences, several teachers, a
# teacher behind a server, another tokenizer: [docs/distillation.md](../docs/distillation.md).
