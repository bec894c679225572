"""Fine-tune a Llama with LoRA, save the adapter, load it again and merge it.

python peft_lora.py --size 7b --rank 16 --seq-len 2048
"""

import argparse

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

SIZES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}


def load_base(args):
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to("cuda")
    config = LlamaConfig(**SIZES[args.size], torch_dtype="bfloat16")
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def random_texts(args, vocab_size):
    """Stand in for a tokenized data set: ids, with the prompt left out of the labels."""
    input_ids = torch.randint(vocab_size, (args.num_examples, args.seq_len))
    labels = input_ids.clone()
    labels[:, : args.seq_len // 4] = -100
    return TensorDataset(input_ids, torch.ones_like(input_ids), labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="local folder; random weights of --size without it")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--num-examples", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--output-dir", default="lora-out")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = load_base(args)
    vocab_size = model.config.vocab_size
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        lora_dropout=0.05,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    dataset = random_texts(args, vocab_size)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, pin_memory=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr)
    num_steps = args.epochs * len(loader) // args.accumulation
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model.train()
    for epoch in range(args.epochs):
        for step, batch in enumerate(loader):
            input_ids, attention_mask, labels = (t.cuda(non_blocking=True) for t in batch)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
            (outputs.loss / args.accumulation).backward()
            if (step + 1) % args.accumulation == 0:
                torch.nn.utils.clip_grad_norm_(trainable, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                print(f"epoch {epoch} step {step + 1} loss {outputs.loss.item():.4f}")

    model.save_pretrained(args.output_dir)
    print(f"peak memory of training {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    del model, trainable, optimizer, scheduler, outputs
    torch.cuda.empty_cache()

    model = PeftModel.from_pretrained(load_base(args), args.output_dir, torch_device="cuda")
    model = model.merge_and_unload().eval()
    prompt = torch.randint(vocab_size, (1, 16), device="cuda")
    with torch.no_grad():
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=8,
            do_sample=True,
            pad_token_id=0,
        )
    print(generated[0].tolist())


if __name__ == "__main__":
    main()
