"""Merge a LoRA adapter without a second base model on the device.

python examples/recipes/merge_adapter.py
"""

import gc
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import residency

logging.disable_progress_bar()
if not torch.accelerator.is_available():
    residency.sim.enable("512MiB")  # a simulated device; compiled once, for about a minute
device = torch.accelerator.current_accelerator()
memory = torch.accelerator.memory_allocated
peak = torch.accelerator.max_memory_allocated


def mib(num_bytes):
    return f"{num_bytes / 2**20:.2f} MiB"


def train(base, folder):
    """Returns a model with an adapter after two steps; the adapter is saved, too."""
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(2):
        tokens = torch.randint(2048, (2, 64), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return model


def merged_on_host(model):
    """Returns the merged weights on the host; the model on the device stays as it is.

    At any time the device has one layer's merged weight more.
    """
    merged = {}
    for name, parameter in model.get_base_model().named_parameters():
        if "lora_" not in name:
            merged[name.replace(".base_layer", "")] = parameter.detach().cpu()
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            weight = layer.get_base_layer().weight.detach()
            for adapter in layer.active_adapters:
                weight = weight + layer.get_delta_weight(adapter)
            merged[f"{name}.weight"] = weight.detach().cpu()
    return merged


def stock(base_folder, adapter_folder):
    """Loads the base a second time, as most scripts do."""
    base = LlamaForCausalLM.from_pretrained(base_folder).to(device)
    model = PeftModel.from_pretrained(base, adapter_folder, torch_device=str(device))
    return model.merge_and_unload()


def more_at_peak(call, *arguments):
    """Returns a call's result, and the device bytes by which its peak exceeded those before it."""
    gc.collect()
    before = memory()
    torch.accelerator.reset_peak_memory_stats()
    return call(*arguments), peak() - before


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
    )
    with tempfile.TemporaryDirectory() as base_folder, tempfile.TemporaryDirectory() as adapter:
        base = LlamaForCausalLM(config)
        base.save_pretrained(base_folder)
        model = train(base.to(device), adapter)
        print(f"the base model and its adapter: {mib(memory())}")
        second, more = more_at_peak(stock, base_folder, adapter)
        print(f"the base loaded again, to merge: {mib(more)} more")
    expected = {name: weight.cpu() for name, weight in second.named_parameters()}
    del second

    merged, more_on_host = more_at_peak(merged_on_host, model)
    print(f"merged on the host, layer by layer: {mib(more_on_host)} more, training may go on")
    with tempfile.TemporaryDirectory() as folder:
        model.get_base_model().save_pretrained(folder, state_dict=merged)
        read = dict(LlamaForCausalLM.from_pretrained(folder).named_parameters())
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], weight) for name, weight in expected.items())

    whole, more_in_place = more_at_peak(model.merge_and_unload)
    print(f"merged in place, at the end: {mib(more_in_place)} more")
    assert all(torch.equal(w.cpu(), expected[name]) for name, w in whole.named_parameters())
    assert max(more_on_host, more_in_place) < more / 5
    print(f"the same bits three times: {len(expected)} tensors")


if __name__ == "__main__":
    main()
