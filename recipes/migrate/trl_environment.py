# GRPO in an environment: its methods are the model's tools, and it scores itself.
import reinforge


class IncrementEnv:
    def reset(self, target, **columns):
        self.counter = 0
        self.target = target

    def get_reward(self):
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """Adds to the counter, and returns what it is then.

        Args:
            step: What to add.
        """
        self.counter += step
        return self.counter


rows = [{"prompt": f"Increment the counter by {n}.", "target": n} for n in range(1, 7)]
settings = dict(prompts_per_step=6, learning_rate=1e-6, max_new_tokens=512)
reinforge.train(model="Qwen/Qwen3-0.6B", data=rows, env=IncrementEnv, steps=1000, **settings)
