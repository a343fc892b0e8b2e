"""Fine-tune with TRL's `SFTTrainer`: all weights, a LoRA adapter, or a LoRA adapter on 4-bit weights.

    python examples/sft.py CHECKPOINT OUT
    python examples/sft.py CHECKPOINT OUT --lora
    python examples/sft.py CHECKPOINT OUT --qlora

The adapter in OUT fits the Hugging Face model. PEFT, vLLM and other libraries load it without conversion.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from trl import SFTConfig, SFTTrainer

from nrl_models import AutoModelForCausalLM

TEXTS = ["def main():\n    return 0\n", "import os\nprint(os.getcwd())\n", "class Error(Exception):\n    pass\n"]


def trainer_for(
    model: PreTrainedModel, tokenizer: Any, texts: list[str], out: str, *, lora: bool = False, **options: Any
) -> SFTTrainer:
    """Create a trainer on `texts`. `options` are passed to `SFTConfig`."""
    options = {"per_device_train_batch_size": 2, "max_length": 64, "save_strategy": "no"} | options
    arguments = SFTConfig(out, logging_steps=1, report_to=[], disable_tqdm=True, **options)
    config = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "up_proj"]) if lora else None
    return SFTTrainer(
        model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer,
        peft_config=config,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Load, train and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--qlora", action="store_true")
    options = parser.parse_args(arguments)
    if options.qlora:
        quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, quantization_config=quantized)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    trainer = trainer_for(
        model, AutoTokenizer.from_pretrained(options.checkpoint), TEXTS * 4, options.out,
        lora=options.lora or options.qlora, max_steps=options.steps, bf16=torch.cuda.is_available(),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(options.out)
    print([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
