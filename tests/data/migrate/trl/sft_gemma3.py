# Keys and values of huggingface/trl, examples/scripts/sft_gemma3.py
from datasets import load_dataset
from transformers import AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer


def main():
    model_id = "google/gemma-3-12b-it"
    training_args = SFTConfig(
        output_dir=f"{model_id}-codeforces-SFT",
        bf16=True,
        use_liger_kernel=True,
        max_length=8192,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        dataset_num_proc=32,
        num_train_epochs=1,
    )
    rows = load_dataset("open-r1/codeforces-cots", split="train")
    trainer = SFTTrainer(
        args=training_args,
        model=AutoModelForImageTextToText.from_pretrained(model_id, attn_implementation="eager"),
        train_dataset=rows.remove_columns("prompt"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
