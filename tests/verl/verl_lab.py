"""What the workers of these tests share: a small model on the disk, verl's own configuration, its
real worker with an actor and a reference, and batches as its trainer makes them."""

from __future__ import annotations

import argparse
import functools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from residency.integrations import verl as door

# Wide enough that logits and gathered parameters are larger than the allocator's small blocks.
NUM_WORDS = 4096
PROMPT = 8


def become_rank(rank: int, num_ranks: int, meeting_place: Path) -> None:
    """Sets what Ray would set in a worker's process."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "DIST_INIT_METHOD": f"file://{meeting_place}",
    }


def save_model(folder: Path) -> None:
    """Writes a model of 0.6 M parameters and its tokenizer, as `from_pretrained` reads them."""
    import transformers
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, NUM_WORDS)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=NUM_WORDS,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            pad_token_id=0,
            eos_token_id=1,
        )
    ).save_pretrained(folder)


def config_of(model: Path, *overrides: str, strategy: str = "fsdp2") -> Any:
    """Returns the part of verl's own configuration that its worker gets."""
    part = "actor_rollout_ref"
    settings = [
        f"{part}.model.path={model}",
        f"{part}.model.use_remove_padding=False",
        f"+{part}.model.override_config.attn_implementation=eager",
        f"{part}.actor.strategy={strategy}",
        f"{part}.actor.fsdp_config.strategy={strategy}",
        f"{part}.ref.fsdp_config.strategy={strategy}",
        f"{part}.actor.fsdp_config.use_torch_compile=False",
        f"{part}.ref.fsdp_config.use_torch_compile=False",
        f"{part}.actor.ppo_mini_batch_size=4",
        f"{part}.actor.ppo_micro_batch_size_per_gpu=2",
        f"{part}.ref.log_prob_micro_batch_size_per_gpu=2",
        f"{part}.rollout.log_prob_micro_batch_size_per_gpu=2",
        f"{part}.actor.optim.lr=1e-2",
        *(f"{part}.{override}" for override in overrides),
    ]
    return _composed(settings)[part]


def _composed(settings: list[str]) -> Any:
    from hydra import compose, initialize_config_dir

    import verl

    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", overrides=settings)


OFFLOADED = (
    "actor.optim.optimizer_impl=residency.integrations.verl",
    "actor.optim.optimizer=OffloadedAdamW",
    "actor.optim.override_optimizer_config={bucket: 256KiB, slots: 2, betas: [0.8, 0.95]}",
)
PLAIN = ("actor.optim.override_optimizer_config={betas: [0.8, 0.95]}",)


def make_worker(config: Any, kind: type | None = None) -> Any:
    """Makes verl's worker with an actor and a reference, and no rollout, as Trinity-RFT does.

    Args:
        config: Of `config_of`.
        kind: A subclass of verl's ``ActorRolloutRefWorker``; by default that itself.
    """
    from verl.workers.engine_workers import ActorRolloutRefWorker

    worker = (kind or ActorRolloutRefWorker)(config, "actor_rollout_ref")
    role, worker.role = worker.role, "actor_ref"
    worker.init_model()
    worker.role = role
    return worker


def make_critic(model: Path, *overrides: str, kind: type | None = None) -> Any:
    """Makes the worker of a critic, from verl's own configuration, as its trainer does.

    verl asks for flash-attn by name, which needs a GPU; the model gets eager attention instead.

    Args:
        model: The folder of `save_model`.
        overrides: Of the critic's part of the configuration.
        kind: A subclass of verl's ``TrainingWorker``; by default that itself.
    """
    import transformers
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
    from verl.workers.utils.losses import value_loss

    settings = [
        "critic.strategy=fsdp2",
        "critic.fsdp.strategy=fsdp2",
        "critic.fsdp.use_torch_compile=False",
        f"critic.model.path={model}",
        "critic.model.use_remove_padding=False",
        "+critic.model.override_config.attn_implementation=eager",
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "critic.optim.lr=1e-2",
        *(f"critic.{override}" for override in overrides),
    ]
    config = omega_conf_to_dataclass(_composed(settings).critic)
    config.engine.max_token_len_per_gpu = config.ppo_max_token_len_per_gpu
    config.engine.infer_max_token_len_per_gpu = config.ppo_infer_max_token_len_per_gpu
    torch.manual_seed(0)  # of the head, which is new
    worker = (kind or TrainingWorker)(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=config.model,
            engine_config=config.engine,
            optimizer_config=config.optim,
            checkpoint_config=config.checkpoint,
        )
    )
    found = transformers.AutoModelForTokenClassification
    load = functools.partial(_with_eager_attention, found.from_pretrained)
    with mock.patch.object(found, "from_pretrained", load):
        worker.reset()
    worker.set_loss_fn(functools.partial(value_loss, config=config))
    return worker


def _with_eager_attention(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return load(*args, **{**kwargs, "attn_implementation": "eager"})


def _text(length: int) -> torch.Tensor:
    """A source file of Python's own as ``int64`` ``[4, length]``, two bytes a token."""
    source = Path(argparse.__file__).read_bytes()
    tokens = torch.frombuffer(bytearray(source[: 8 * length]), dtype=torch.int16).long()
    return (tokens.view(4, length) % (NUM_WORDS - 2)) + 2


def batch(length: int) -> Any:
    """Returns four sequences of different lengths, up to ``length``, as verl's trainer has them."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    tokens = _text(length)
    mask = torch.ones_like(tokens)
    for row in range(4):
        mask[row, length - row :] = 0
    response = mask[:, PROMPT:]
    advantages = torch.linspace(-1, 1, 4)[:, None] * response
    data = tu.get_tensordict(
        {
            "input_ids": tokens,
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "attention_mask": mask,
            "position_ids": torch.arange(length).repeat(4, 1),
            "response_mask": response,
            "old_log_probs": torch.full_like(advantages, -8.0),
            "ref_log_prob": torch.full_like(advantages, -8.0),
            "advantages": advantages,
            "values": advantages,
            "returns": advantages + 1,
        }
    )
    return left_right_2_no_padding(data)


def _of_a_forward(length: int, **more: bool) -> Any:
    from verl.utils import tensordict_utils as tu

    data = batch(length)
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0, **more)
    return data


def compute_reference(worker: Any, length: int) -> torch.Tensor:
    from verl.utils import tensordict_utils as tu

    return tu.get(worker.compute_ref_log_prob(_of_a_forward(length)), "log_probs").values()


def compute_own(worker: Any, length: int, **more: bool) -> torch.Tensor:
    """Returns the policy's own, or without the adapter, where it is said so, the reference's."""
    from verl.utils import tensordict_utils as tu

    return tu.get(worker.compute_log_prob(_of_a_forward(length, **more)), "log_probs").values()


def _of_an_update(length: int) -> Any:
    from verl.utils import tensordict_utils as tu

    data = batch(length)
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=4,
        mini_batch_size=4,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
        temperature=1.0,
    )
    return data


def update(worker: Any, length: int) -> None:
    worker.update_actor(_of_an_update(length))


def update_critic(worker: Any, length: int) -> None:
    worker.train_mini_batch(_of_an_update(length))


def own_part(value: Any) -> torch.Tensor:
    """Returns a tensor, or what this rank has of it."""
    from torch.distributed.tensor import DTensor

    found: torch.Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found.detach()


def sums_of(worker: Any) -> dict[str, int]:
    """Returns a sum over the bits of each parameter and each state of the optimizer."""
    engine = worker.engine if hasattr(worker, "engine") else worker.actor.engine
    tensors = dict(engine.module.named_parameters())
    for number, state in engine.optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in state.items()}
    assert len(tensors) > len(list(engine.module.parameters()))
    return {
        name: zlib.crc32(own_part(value).cpu().reshape(-1).view(torch.uint8).numpy())
        for name, value in tensors.items()
    }


def train(worker: Any, lengths: Sequence[int]) -> list[int]:
    """Takes a step with each length; returns what was reserved after each one's transitions."""
    reserved = []
    for length in lengths:
        compute_reference(worker, length)
        update(worker, length)
        reserved.append(torch.cuda.memory_reserved())
    return reserved


@contextmanager
def guard(need: str | None = None) -> Iterator[None]:
    door.install_guard(need)
    try:
        yield
    finally:
        door.remove_guard()
