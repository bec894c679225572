"""Pretrain a Llama- or Qwen-like model with the Trainer of transformers, in bf16.

python hf_trainer.py --model qwen3 --hidden-size 2048 --num-layers 28
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


class RandomTokens(Dataset):
    def __init__(self, size, length, vocab_size):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab_size, (size, length), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def build_model(args):
    sizes = {
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_kv_heads,
        "max_position_embeddings": args.seq_len,
        "use_cache": False,
    }
    if args.model == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    head_dim = args.hidden_size // args.num_heads
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=head_dim, tie_word_embeddings=True))


def compute_metrics(prediction):
    predicted, labels = prediction
    return {"accuracy": (predicted[:, :-1] == labels[:, 1:]).mean()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["llama", "qwen3"], default="qwen3")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=6144)
    parser.add_argument("--num-layers", type=int, default=28)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--eval-steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=500)
    parser.add_argument("--train-size", type=int, default=2000)
    parser.add_argument("--eval-size", type=int, default=16)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--resume-from-checkpoint")
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()

    set_seed(42)
    model = build_model(args)
    print(f"{model.num_parameters() / 1e6:.1f}M parameters")
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        bf16=True,
        gradient_checkpointing=not args.no_checkpointing,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.1,
        max_grad_norm=1.0,
        max_steps=args.max_steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        save_steps=args.save_steps,
        save_total_limit=2,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=RandomTokens(args.train_size, args.seq_len, args.vocab_size),
        eval_dataset=RandomTokens(args.eval_size, args.seq_len, args.vocab_size),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    print(trainer.evaluate())
    trainer.save_model(args.output_dir)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
