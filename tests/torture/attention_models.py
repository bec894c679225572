"""Layers and models whose attention is judged: what a random one is, and its run on a device."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from typing import Any

import torch
from tests.torture.attention_oracle import Call
from torch import nn
from torch.nn import functional


def bytes_of(which: str) -> int:
    """Returns what was asked of the allocator, without its rounding."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


# --------------------------------------------------------------------- torch's layers, in inference


def draw_layer(chance: random.Random) -> dict[str, Any]:
    """Draws a layer of torch's, and a batch for it."""
    heads = chance.choice([2, 4, 8])
    return {
        "kind": "layer",
        "module": chance.choice(["layer", "layer", "encoder", "attention"]),
        "dtype": chance.choice(["float32", "bfloat16", "float16"]),
        "batch": chance.choice([1, 2, 5]),
        "length": chance.choice([2, 17, 100, 256, 300]),
        "heads": heads,
        "width": heads * chance.choice([8, 16, 64, 96]),
        "hidden": chance.choice([32, 256, 1024]),
        "norm_first": chance.random() < 0.5,
        "activation": chance.choice(["relu", "gelu"]),
        "is_padded": chance.random() < 0.4,
        "weights": chance.random() < 0.3,
    }


def run_layer(case: dict[str, Any]) -> dict[str, Any]:
    """Runs a layer without gradients and returns its figures."""
    dtype, width = getattr(torch, case["dtype"]), case["width"]
    with torch.device("cuda"):
        if case["module"] == "attention":
            module: nn.Module = nn.MultiheadAttention(width, case["heads"], batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(
                *(width, case["heads"], case["hidden"]),
                norm_first=case["norm_first"],
                activation=case["activation"],
                batch_first=True,
            )
            module = layer if case["module"] == "layer" else nn.TransformerEncoder(layer, 2)
    module = module.to(dtype).eval()
    x = torch.empty(case["batch"], case["length"], width, device="cuda", dtype=dtype)
    padding = None
    if case["is_padded"]:
        padding = torch.zeros(case["batch"], case["length"], dtype=torch.bool, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = bytes_of("current")
    with torch.no_grad():
        if case["module"] == "attention":
            out = module(x, x, x, need_weights=case["weights"], key_padding_mask=padding)
        else:
            out = module(x, src_key_padding_mask=padding)
    peak = bytes_of("peak") - before
    gc.collect()  # frames of first imports keep a mask in a cycle
    held = bytes_of("current") - before
    del out
    return {"peak": peak, "held": held}


# -------------------------------------------------------------------------- models of transformers

MODELS = ["llama", "gpt2", "bert", "t5"]


def draw_model(chance: random.Random) -> dict[str, Any]:
    """Draws a small model of Transformers, and how it is run."""
    return {
        "kind": "model",
        "model": chance.choice(MODELS),
        "attention": "sdpa" if chance.random() < 0.85 else "eager",
        "dtype": chance.choice(["float32", "bfloat16", "float16"]),
        "autocast": chance.choice([None, None, "bfloat16"]),
        "checkpoint": chance.random() < 0.3,
        "is_training": chance.random() < 0.7,
        "mask": chance.choice(["none", "ones", "padded"]),
        "batch": chance.choice([1, 2, 3]),
        "length": chance.choice([33, 64, 200]),
        "head_width": chance.choice([16, 64, 80]),
    }


def model_of(case: dict[str, Any]) -> nn.Module:
    """Makes a model with random weights on the device."""
    import transformers as t

    wide = {"vocab_size": 100, "attn_implementation": case["attention"]}
    width = 4 * case["head_width"]
    name = case["model"]
    with torch.device("cuda"):
        if name == "llama":
            sizes = {"hidden_size": width, "intermediate_size": 128, "num_hidden_layers": 2}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
            return t.LlamaForCausalLM(t.LlamaConfig(**wide, **sizes, **heads))
        if name == "gpt2":
            return t.GPT2LMHeadModel(t.GPT2Config(**wide, n_embd=width, n_layer=2, n_head=4))
        if name == "bert":
            sizes = {"hidden_size": width, "intermediate_size": 128, "num_hidden_layers": 2}
            return t.BertForMaskedLM(t.BertConfig(**wide, **sizes, num_attention_heads=4))
        sizes = {"d_model": width, "d_kv": case["head_width"], "d_ff": 128, "num_layers": 2}
        config = t.T5Config(**wide, **sizes, num_heads=4)
        config.decoder_start_token_id = 0
        return t.T5ForConditionalGeneration(config)


def run_model(case: dict[str, Any]) -> dict[str, Any]:
    """Runs a step of a model and returns the calls of attention that it made."""
    model = model_of(case).to(getattr(torch, case["dtype"]))
    model.train(case["is_training"])
    if case["checkpoint"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(100, (case["batch"], case["length"])).cuda()
    options: dict[str, Any] = {"input_ids": ids}
    if case["mask"] != "none":
        mask = torch.ones(case["batch"], case["length"], dtype=torch.long)
        if case["mask"] == "padded":
            mask[:, -5:] = 0
        options["attention_mask"] = mask.cuda()
    options["labels"] = ids
    cast = contextlib.nullcontext()
    if case["autocast"]:
        cast = torch.autocast("cuda", getattr(torch, case["autocast"]))
    calls: list[dict[str, Any]] = []
    with watched(calls), torch.set_grad_enabled(case["is_training"]):
        with cast:
            loss = model(**options).loss
        if case["is_training"]:
            loss.backward()
    return {"calls": calls}


@contextlib.contextmanager
def watched(calls: list[dict[str, Any]]) -> Iterator[None]:
    """Writes down each call of attention: its tensors, and what it took and kept."""
    stock = functional.scaled_dot_product_attention

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = bytes_of("current")
        out = stock(query, key, value, attn_mask=attn_mask, **options)
        found = {"held": bytes_of("current") - before, "forward": bytes_of("peak") - before}
        tensors = [written(each) for each in (query, key, value, attn_mask)]
        asked = {"attn_mask": attn_mask, **options}
        asked.pop("scale", None)
        found["choice"] = torch._fused_sdp_choice(query, key, value, **asked)
        cast_to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else None
        found["output"] = out.untyped_storage().nbytes()
        del asked["attn_mask"]
        name = cast_to and str(cast_to).removeprefix("torch.")
        calls.append({"tensors": tensors, "options": asked, "cast_to": name, **found})
        return out

    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = stock


def written(tensor: torch.Tensor | None) -> dict[str, Any] | None:
    """Returns what lays a tensor out."""
    if tensor is None:
        return None
    learns = tensor.requires_grad and torch.is_grad_enabled()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": tensor.shape, "strides": tensor.stride(), "dtype": dtype, "learns": learns}


def read(written_call: dict[str, Any]) -> tuple[Call, list[torch.Tensor]]:
    """Makes a call of what was written down of it, and the copies that autocast makes for it."""
    made: list[Any] = []
    copies: list[torch.Tensor] = []
    name = written_call["cast_to"]
    for each in written_call["tensors"]:
        if each is not None:
            dtype = getattr(torch, each["dtype"])
            tensor = torch.empty_strided(each["shape"], each["strides"], dtype=dtype, device="meta")
            if name and dtype.is_floating_point and dtype != getattr(torch, name):
                tensor = torch.empty_like(tensor, dtype=getattr(torch, name))
                copies.append(tensor)
            each = tensor.requires_grad_(each["learns"])
        made.append(each)
    options = written_call["options"]
    call = Call(
        *made,
        dropout=options.get("dropout_p", 0.0),
        causal=bool(options.get("is_causal", False)),
        gqa=options.get("enable_gqa", False),
    )
    return call, copies
