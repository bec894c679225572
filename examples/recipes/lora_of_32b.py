"""A LoRA of a 32B base in bf16 on a card of 24 GB: the base stays on the host.

python examples/recipes/lora_of_32b.py

It foresees the training by dry runs, once with everything on the card and once with the base
streamed. It takes about two minutes on two CPU cores and needs PEFT and Transformers; neither a GPU
nor the 61 GiB of the base have to be there.
"""

import argparse
import re
import subprocess
import sys

QWEN3_32B = {  # of Qwen/Qwen3-32B, config.json
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def train(is_streamed, num_tokens):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3Config

    import residency

    # In your run: AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-32B", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3_32B), dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)

    if is_streamed:
        residency.stream_frozen(model)  # in the place of model.to("cuda")
    else:
        model.to("cuda")

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-4)
    for _ in range(4):
        tokens = torch.randint(1000, (1, num_tokens)).cuda()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", choices=["resident", "streamed"])
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    if args.train:
        train(args.train == "streamed", args.tokens)
        return
    for how in ("resident", "streamed"):
        command = [sys.executable, "-m", "residency", "dry-run", "--quiet", "--device", "rtx4090"]
        script = ["--", sys.executable, __file__, "--train", how, "--tokens", str(args.tokens)]
        answer = subprocess.run(command + script, stdout=subprocess.PIPE, text=True)
        first, *lines = answer.stdout.splitlines()
        print(f"the base {how}, on one rtx4090: {first.partition(' with')[0]}", flush=True)
        host = next(line for line in lines if line.startswith("host memory"))
        print(re.sub(r"\.\d\d GiB", " GiB", host), flush=True)
        assert (answer.returncode == 0) == (how == "streamed")


if __name__ == "__main__":
    main()
