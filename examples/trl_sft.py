"""Supervised fine-tuning of a chat model with the SFTTrainer of TRL.

python trl_sft.py --hidden-size 2048 --num-layers 16
"""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversations(count):
    """Questions of arithmetic, as a data set of conversations."""
    rows = []
    for i in range(count):
        question = f"What is {i} plus {3 * i + 1}? Explain how you get there, step by step."
        answer = f"Add {i} and {3 * i + 1}. The units first, then the tens. It is {4 * i + 1}. "
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer * 8},
        ]
        rows.append({"messages": messages})
    return Dataset.from_list(rows)


def build_tokenizer(dataset):
    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for row in dataset["messages"] for message in row)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=8192)
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--num-examples", type=int, default=256)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--output-dir", default="sft-out")
    args = parser.parse_args()

    dataset = conversations(args.num_examples)
    tokenizer = build_tokenizer(dataset)
    split = dataset.train_test_split(test_size=16, seed=0)
    config = LlamaConfig(
        vocab_size=max(args.vocab_size, len(tokenizer)),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        max_position_embeddings=args.max_length,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    training_args = SFTConfig(
        output_dir=args.output_dir,
        bf16=True,
        max_length=args.max_length,
        packing=args.packing,
        gradient_checkpointing=True,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=2e-5,
        max_steps=args.max_steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(1, args.max_steps // 2),
        save_steps=args.max_steps,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model(args.output_dir)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
