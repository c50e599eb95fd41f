"""Train a small language model with transformers' Trainer, which evaluates and accumulates gradients."""

from typing import Any

import peft
import torch
from recording import KINDS, ROOT, begin, note_batch, note_end
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from stepkeeper import CheckpointManager
from stepkeeper.integrations.transformers import train

n_workers = begin()
set_seed(5)
model: Any = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
        max_position_embeddings=16,
    )
)
if "peft" in KINDS:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
tokens = torch.randint(32, (22, 8), generator=torch.Generator().manual_seed(0))
data: Any = [{"input_ids": row, "labels": row} for row in tokens]


class Noting(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        result = super().compute_loss(model, inputs, *arguments, **options)
        loss = result[0] if isinstance(result, tuple) else result
        note_batch("train" if model.training else "evaluate", inputs["input_ids"], loss)
        return result

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        super().log(logs, *arguments)
        timed = ("second", "runtime", "train_loss")
        print("log", {name: value for name, value in logs.items() if not name.endswith(timed)}, flush=True)


with CheckpointManager(ROOT, save=4) as manager:
    trainer = Noting(
        model,
        TrainingArguments(
            f"{ROOT}-trainer",
            num_train_epochs=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            warmup_steps=3,
            logging_steps=4,
            eval_strategy="epoch" if "epoch" in KINDS else "steps",
            eval_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_num_workers=n_workers,
            seed=5,
        ),
        train_dataset=data,
        eval_dataset=data[:4],
    )
    train(trainer, manager)
    note_end(model, trainer.state.global_step)
