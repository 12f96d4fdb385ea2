# GRPO with two rewards, each for rows of its own task: None says that a reward has nothing to say.
import reinforge

rows = [
    {"task": "math", "prompt": "What is 2+2?", "answer": "4"},
    {"task": "code", "prompt": "Write a function that adds a and b.", "answer": "a + b"},
    {"task": "math", "prompt": "What is 3*4?", "answer": "12"},
    {"task": "code", "prompt": "Write a function that multiplies a and b.", "answer": "a * b"},
]


def math_reward(completions, answer, task, **columns):
    right = [text.strip() == want for text, want in zip(completions, answer)]
    return [2.0 * r - 1 if t == "math" else None for r, t in zip(right, task)]


def code_reward(completions, answer, task, **columns):
    right = [f"return {want}" in text for text, want in zip(completions, answer)]
    return [2.0 * r - 1 if t == "code" else None for r, t in zip(right, task)]


settings = dict(prompts_per_step=4, learning_rate=1e-6, max_new_tokens=512)
rewards = [math_reward, code_reward]
reinforge.train(model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, rewards=rewards, **settings)
