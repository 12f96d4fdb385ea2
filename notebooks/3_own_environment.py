# %% [markdown]
# # An environment of your own, with tools
#
# A warehouse: how many of an item are on the shelf? Nobody can know that by heart, because it is
# another number in every episode. There is a tool that counts.

# %%
import random

import reinforge
from reinforge.models.tiny import make_tiny_model

rng = random.Random(0)
ITEMS = "ABCDEF"


def make_row():
    item = rng.choice(ITEMS)
    stock = rng.randint(0, 9)
    return {"prompt": f"{item}?", "item": item, "stock": stock, "answer": str(stock)}


# %% [markdown]
# ## The environment
#
# A class: `reset` gets the columns of a row, and every other public method is a tool. Its type
# hints and docstring are what the model is told about it. Each episode has an object of its own.


# %%
class Warehouse:
    def reset(self, item, stock, **columns):
        self.shelf = {item: stock}

    def count(self, item: str) -> int:
        """Counts an item on the shelf.

        Args:
            item: Its name.
        """
        return self.shelf[item]


# %% [markdown]
# A tool that raises (here: an item that is not on the shelf) does not end the run; the model gets
# to read what went wrong.
#
# ## A model that has seen tool calls
#
# A model from the hub knows how to write them. This one is made from nothing, so it is shown
# transcripts first: in two of five the tool is called, in the others a number is made up.

# %%
schema = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}


def transcript(row):
    question = {"role": "user", "content": row["prompt"]}
    if rng.random() > 0.4:
        guess = {"role": "assistant", "content": str(rng.randint(0, 9))}
        return {"messages": [question, guess], "tools": [schema]}
    call = {"type": "function", "function": {"name": "count", "arguments": {"item": row["item"]}}}
    messages = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "count", "content": row["answer"]},
        {"role": "assistant", "content": row["answer"]},
    ]
    return {"messages": messages, "tools": [schema]}


words = [
    '<tool_call>{"name": "count", "arguments": {"item": "A"}}</tool_call>',
    f"T: count\nQ:{'?'.join(ITEMS)}\nA:4\nR:4\n",
]
model = make_tiny_model(
    "runs/warehouse-model",
    width=64,
    layers=2,
    heads=4,
    kv_heads=4,
    context=128,
    text=words * 50,
    vocabulary=500,
    spread=0.08,
    chat=True,
)
shown = reinforge.train(
    model=model,
    data=[transcript(make_row()) for _ in range(1000)],
    algorithm="sft",
    steps=150,
    prompts_per_step=32,
    learning_rate=3e-3,
    overrides=["train.schedule.kind=cosine", "train.schedule.warmup=20"],
)

# %% [markdown]
# ## Train in the environment
#
# The reward looks at the last turn. That the tool helps is for the model to find out. Only what
# the model wrote is trained, never what the tool answered.
#
# `shown.model` is a model of transformers, in memory; it is trained in place.

# %%
result = reinforge.train(
    model=shown.model,
    tokenizer=shown.tokenizer,
    data=[make_row() for _ in range(400)],
    env=Warehouse,
    rewards=["exact_number"],
    steps=20,
    prompts_per_step=8,
    group_size=8,
    max_new_tokens=32,
    learning_rate=1e-3,
    overrides=["env.max_turns=3"],
)

# %% [markdown]
# ## Did it learn to use the tool?
#
# `env/calls` is the number of calls per episode; a guess is right one time in ten.

# %%
history = result.history[["reward/mean", "env/calls", "env/malformed_calls", "env/turns"]]
before, after = history.iloc[:4].mean(), history.iloc[-4:].mean()
history.iloc[::5]

# %%
assert after["env/calls"] > before["env/calls"] + 0.15, (before, after)
assert after["reward/mean"] > before["reward/mean"] + 0.08, (before, after)
print(f"calls per episode: {before['env/calls']:.2f} -> {after['env/calls']:.2f}")
print(f"mean reward: {before['reward/mean']:.2f} -> {after['reward/mean']:.2f}")

# %% [markdown]
# Next: [DPO from preferences](4_dpo.ipynb). Environments that write their turns themselves, games,
# MCP servers, other libraries' environments: [docs/environments.md](../docs/environments.md).
