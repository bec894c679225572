"""Trains an adapter with a Trainer, which loads the best one at the end.

An embedding is among the adapter's modules, so that PEFT saves it and the head with the adapter:
2 x 128 MiB. A comment ``# +`` says which lines of an answer belong there, and ``# -`` which take
the place of those up to the next one.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

# + import, from
parser = argparse.ArgumentParser()
parser.add_argument("--sequence", type=int, default=64)
parser.add_argument("--tunes", action="store_true", help="train the embedding itself")
parser.add_argument("--rows", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=32768)
parser.add_argument("--layers", type=int, default=2)
args = parser.parse_args()

config = LlamaConfig(
    vocab_size=args.vocabulary,
    hidden_size=1024,
    intermediate_size=1024,
    num_hidden_layers=args.layers,
    num_attention_heads=8,
)
model = LlamaForCausalLM(config)
kinds = ["q_proj", "v_proj"]
if args.tunes:
    adapter = LoraConfig(r=8, target_modules=kinds, modules_to_save=["embed_tokens"])
else:
    adapter = LoraConfig(r=8, target_modules=[*kinds, "embed_tokens"])
model = get_peft_model(model, adapter)
# + model.
given_arguments = {
    "output_dir": "out",
    "max_steps": 2,
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "per_device_train_batch_size": args.rows,
    "per_device_eval_batch_size": 1,
    "prediction_loss_only": True,
    "report_to": [],
    "disable_tqdm": True,
}
# - TrainingArguments
arguments = TrainingArguments(**given_arguments)
# -
tokens = torch.arange(args.sequence)
rows = [{"input_ids": tokens, "labels": tokens}] * 16
given_trainer = {
    "model": model,
    "args": arguments,
    "train_dataset": rows,
    "eval_dataset": rows[:2],
}
# - class MyTrainer, Trainer(, MyTrainer(
trainer = Trainer(**given_trainer)
# -
trainer.train()
