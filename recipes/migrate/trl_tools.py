# GRPO with tools: the model calls functions, plain or async, before it answers.
import reinforge


def multiply(a: int, b: int) -> int:
    """Multiplies two integers."""
    return a * b


async def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


def right(completions, answer, **columns):
    return [float(text.strip() == want) for text, want in zip(completions, answer)]


pairs = [(a, b) for a in range(2, 10) for b in range(2, 10)]
rows = [{"prompt": f"What is {a} times {b}?", "answer": str(a * b)} for a, b in pairs]
settings = dict(epochs=3, prompts_per_step=8, learning_rate=1e-6, max_new_tokens=512)
model = "Qwen/Qwen3-0.6B"
reinforge.train(model=model, data=rows, rewards=right, tools=[multiply, add], **settings)
