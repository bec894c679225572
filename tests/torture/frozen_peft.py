"""Random runs of tiny transformers with random adapters of PEFT: resident, or streamed."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import peft
import torch
import transformers
from tests.torture.frozen_models import some
from training_programs import host_copy

import residency

MODELS = ("llama", "qwen", "gpt2", "t5", "mixtral", "bert", "gemma")
ADAPTERS = ("lora", "dora", "ia3", "prompt", "prefix", "saved", "vera", "adalora", "oft", "own")
LINEAR = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "qwen": ["q_proj", "o_proj", "up_proj"],
    "gemma": ["k_proj", "gate_proj"],
    "mixtral": ["q_proj", "v_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "t5": ["q", "v", "wo"],
    "bert": ["query", "value"],
}


def base(kind: str, chance: random.Random) -> Any:
    layers, tie = chance.randint(3, 6), some(chance, 0.5)
    common: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "tie_word_embeddings": tie,
    }
    heads = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    t = transformers
    if kind == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=67, n_embd=32, n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2
            )
        )
    if kind == "t5":
        sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
        made = t.T5Config(
            vocab_size=67, num_layers=layers, **sizes, decoder_start_token_id=0, pad_token_id=0
        )
        return t.T5ForConditionalGeneration(made)
    if kind == "bert":
        return t.BertForMaskedLM(t.BertConfig(**common))
    if kind == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**common, **heads, num_local_experts=3))
    if kind == "gemma":
        return t.Gemma2ForCausalLM(t.Gemma2Config(**common, **heads, head_dim=8))
    if kind == "qwen":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**common, **heads))
    return t.LlamaForCausalLM(t.LlamaConfig(**common, **heads))


def adapted(model: Any, kind: str, name: str, chance: random.Random) -> Any:
    task: Any = {"t5": "SEQ_2_SEQ_LM", "bert": None}.get(kind, "CAUSAL_LM")
    names = LINEAR[kind]
    dropout = chance.choice([0.0, 0.2])
    if name == "own":
        model.requires_grad_(False)
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "norm.weight", "layernorm.weight", "ln_1.weight")):
                parameter.requires_grad_(True)
        if not any(p.requires_grad for p in model.parameters()):
            model.get_input_embeddings().requires_grad_(True)
        return model
    if name in {"lora", "dora", "saved"}:
        settings: dict[str, Any] = {"target_modules": names, "r": 2, "lora_dropout": dropout}
        settings |= {"use_dora": name == "dora", "init_lora_weights": name == "dora"}
        if name == "saved":
            settings["modules_to_save"] = [chance.choice(["lm_head", "norm", "layer_norm", "ln_f"])]
        if some(chance, 0.3):
            settings["layers_to_transform"] = None
            settings["bias"] = "lora_only" if kind in {"gpt2", "bert", "qwen"} else "none"
        made: Any = peft.LoraConfig(task_type=task, **settings)
    elif name == "ia3":
        made = peft.IA3Config(task_type=task, target_modules=names, feedforward_modules=names[2:])
    elif name == "prompt":
        made = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3)
    elif name == "prefix":
        made = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3)
    elif name == "vera":
        made = peft.VeraConfig(task_type=task, target_modules=names[:1], r=4)
    elif name == "adalora":
        made = peft.AdaLoraConfig(
            task_type=task, target_modules=names, init_r=3, target_r=2, total_step=20
        )
    else:
        made = peft.OFTConfig(task_type=task, target_modules=names[:1], r=4, oft_block_size=0)
    return peft.get_peft_model(model, made)


class PeftRun:
    """Is one run of a seed."""

    def __init__(self, seed: int, device: torch.device, streamed: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.device, self.streamed = device, streamed
        self.trace: list[tuple[str, Any]] = []
        torch.manual_seed(seed)
        self.kind, self.name = chance.choice(MODELS), chance.choice(ADAPTERS)
        if (self.kind, self.name) == ("gpt2", "oft") or self.kind == "bert":
            self.name = chance.choice(["lora", "dora", "own"])
        self.dtype = chance.choice([torch.float32, torch.float32, torch.bfloat16])
        model = base(self.kind, chance).to(self.dtype)
        self.model = adapted(model, self.kind, self.name, chance)
        self.log = [f"{self.kind} {self.name} {self.dtype}"]
        if some(chance, 0.4) and self.name != "prefix":
            again = some(chance, 0.5)
            self.model.gradient_checkpointing_enable({"use_reentrant": again})
            self.model.enable_input_require_grads()
            self.log.append(f"checkpointing {again}")
        self.autocast = self.dtype is torch.float32 and some(chance, 0.3)
        self.begin()
        self.opt = torch.optim.AdamW(self.trained(), lr=0.01, fused=some(chance, 0.5))

    def trained(self) -> list[Any]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def begin(self) -> None:
        slots = self.chance.choice([2, 2, 3])
        self.stream: Any = None
        if self.streamed:
            try:
                self.stream = residency.stream_frozen(self.model, slots=slots)
                self.log.append(f"units {self.stream.units} slots {slots}")
            except residency.RefusedError as error:
                self.log.append(f"refused {error}")
        self.model.to(self.device)

    def tokens(self, length: int | None = None) -> torch.Tensor:
        shape = self.chance.randint(1, 3), length or self.chance.randint(2, 9)
        values = [[self.chance.randrange(3, 67) for _ in range(shape[1])] for _ in range(shape[0])]
        return torch.tensor(values).to(self.device)

    def forward(self) -> Any:
        tokens = self.tokens()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return self.model(input_ids=tokens, labels=tokens)

    def step(self) -> None:
        self.model.train()
        for _ in range(self.chance.choice([1, 2])):
            out = self.forward()
            self.trace.append(("logits", out.logits.detach().clone()))
            out.loss.backward()
            self.trace.append(("loss", out.loss.detach()))
        self.trace.append(("g", host_copy([p.grad for p in self.trained()])))
        self.opt.step()
        self.opt.zero_grad()

    def generate(self) -> None:
        if self.kind == "bert" or self.name == "prefix":
            return
        self.model.eval()
        settings: dict[str, Any] = self.chance.choice(
            [{}, {"num_beams": 2}, {"do_sample": True}, {"use_cache": False}]
        )
        tokens = self.tokens(4)
        found = self.model.generate(input_ids=tokens, max_new_tokens=4, pad_token_id=0, **settings)
        self.trace.append(("generated", found.cpu()))

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.trace.append(("evaluation", self.forward().logits.clone()))

    def bare(self) -> None:
        if self.name == "own" or self.name == "adalora":
            return
        self.model.eval()
        with torch.no_grad(), self.model.disable_adapter():
            self.trace.append(("bare", self.forward().logits.clone()))

    def saved(self) -> None:
        if self.name == "own":
            self.trace.append(("saved", host_copy(dict(self.model.state_dict()))))
        else:
            found = peft.get_peft_model_state_dict(self.model)
            self.trace.append(("saved", host_copy(dict(found))))

    def again(self) -> None:
        if self.stream is not None:
            self.stream.stop()
        if self.name in {"lora", "dora", "ia3", "oft"} and some(self.chance, 0.5):
            self.model.to(self.device)
            self.model.merge_adapter()
            self.evaluate()
            self.model.unmerge_adapter()
        self.begin()

    def all(self) -> PeftRun:
        try:
            for _ in range(self.chance.randint(2, 4)):
                self.step()
                action = self.chance.choice(["generate", "evaluate", "bare", "saved", "again"])
                self.log.append(action)
                getattr(self, action)()
            self.trace = [(key, host_copy(value)) for key, value in self.trace]
            with contextlib.suppress(AttributeError):
                self.trace.append(("end", host_copy(list(self.model.parameters()))))
        except BaseException as error:
            error.add_note("\n".join([f"streamed={self.streamed}", *self.log]))
            raise
        if self.stream is not None and some(self.chance, 0.5):
            self.stream.stop()
        del self.model, self.opt, self.stream
        return self
