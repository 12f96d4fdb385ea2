# Keys and values of huggingface/trl, examples/scripts/rloo.py
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward, think_format_reward


def main():
    train_dataset = load_dataset("AI-MO/NuminaMath-TIR", split="train[:5%]")
    training_args = RLOOConfig(
        output_dir="Qwen3-0.6B-RLOO",
        model_init_kwargs={"dtype": torch.bfloat16},
        learning_rate=1e-5,
        log_completions=True,
        num_completions_to_print=2,
        max_completion_length=1024,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.5,
        run_name="Qwen3-0.6B-RLOO-NuminaMath-TIR",
    )
    trainer = RLOOTrainer(
        model="Qwen/Qwen3-0.6B",
        args=training_args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train_dataset,
        peft_config=LoraConfig(),
    )
    trainer.train()


if __name__ == "__main__":
    main()
