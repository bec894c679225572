"""Planted failures, each with a switch for every remedy that a note may name.

``python advice_program.py CASE:MODE ...`` runs each in a process of its own, forked once torch is
there, and prints a line of JSON for each: whether it came to its end, and the note of its error.
The mode ``""`` is the script as it fails.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import residency

MIB = 1 << 20
STEPS = 40
CASES: dict[str, tuple[str, Callable[[str], None]]] = {}


def case(capacity: str) -> Any:
    def add(function: Callable[[str], None]) -> Callable[[str], None]:
        CASES[function.__name__] = capacity, function
        return function

    return add


def net_of(width: int = 256, depth: int = 2) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers).cuda()


def megabytes(number: int) -> torch.Tensor:
    return torch.empty(number * MIB, dtype=torch.uint8, device="cuda")


def train(net: nn.Module, keep: Callable[[torch.Tensor, torch.Tensor], None], rows: int = 2048):
    """Trains, and hands each output and loss to a function, which may keep them."""
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(STEPS):
        output = net(torch.randn(rows, 256, device="cuda"))
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keep(output, loss)


def kept_as(mode: str, value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu() if mode == "host" else value.detach()


@case("96MiB")
def a_running_loss(mode: str) -> None:
    net = net_of()
    total = torch.zeros((), device="cuda")

    def add(output: torch.Tensor, loss: torch.Tensor) -> None:
        nonlocal total
        more = net(torch.randn(2048, 256, device="cuda")).mean()
        total = total + (more.detach() if mode == "detach" else more)

    train(net, add)


@case("96MiB")
def a_list_of_losses(mode: str) -> None:
    net, losses = net_of(), []

    def add(output: torch.Tensor, loss: torch.Tensor) -> None:
        more = net(torch.randn(2048, 256, device="cuda")).mean()
        losses.append(more.item() if mode == "detach" else more)

    train(net, add)


@case("96MiB")
def a_retained_graph(mode: str) -> None:
    net, losses = net_of(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = net(torch.randn(2048, 256, device="cuda")).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(loss.detach() if mode == "detach" else loss)
        optimizer.zero_grad()


@case("96MiB")
def a_hidden_state(mode: str) -> None:
    cell = nn.GRUCell(128, 256).cuda()
    h = torch.zeros(512, 256, device="cuda")
    for _ in range(STEPS):
        h = cell(torch.randn(512, 128, device="cuda"), h.detach() if mode == "detach" else h)
        h.square().mean().backward(retain_graph=True)


@case("96MiB")
def a_hook_that_keeps(mode: str) -> None:
    net, kept = net_of(), []
    net[1].register_forward_hook(lambda module, inputs, output: kept.append(kept_as(mode, output)))
    train(net, lambda output, loss: None)


@case("96MiB")
def a_metric(mode: str) -> None:
    class Metric:
        def __init__(self) -> None:
            self.rows: list[torch.Tensor] = []

    metric = Metric()
    train(net_of(), lambda output, loss: metric.rows.append(kept_as(mode, output)))


@case("96MiB")
def a_cache_by_name(mode: str) -> None:
    cache: dict[str, torch.Tensor] = {}
    train(net_of(), lambda output, loss: cache.update({f"{len(cache)}": kept_as(mode, output)}))


@case("96MiB")
def lengths_that_vary(mode: str) -> None:
    net, kept, draw = net_of(), [], random.Random(0)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(STEPS):
        output = net(torch.randn(draw.randrange(1024, 3072), 256, device="cuda"))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(kept_as(mode, output))


@case("96MiB")
def two_lists(mode: str) -> None:
    kept: dict[str, list[torch.Tensor]] = {"outputs": [], "inputs": []}

    def add(output: torch.Tensor, loss: torch.Tensor) -> None:
        kept["outputs"].append(kept_as(mode, output))
        kept["inputs"].append(kept_as(mode, torch.ones(1024, 256, device="cuda")))

    train(net_of(), add)


@case("64MiB")
def outputs_of_an_evaluation(mode: str) -> None:
    net, outputs = net_of(), []
    train(net, lambda output, loss: None, rows=512)
    with torch.no_grad():
        for _ in range(STEPS):
            outputs.append(kept_as(mode, net(torch.randn(2048, 256, device="cuda"))))


@case("46MiB")
def the_first_step(mode: str) -> None:
    net = net_of(512, 12)
    optimizer = torch.optim.AdamW(net.parameters())
    if mode.startswith("offload"):
        residency.offload_optimizer(optimizer, bucket=mode.partition(" ")[2])
    for _ in range(3):
        net(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@case("72MiB")
def a_request_beside_a_state(mode: str) -> None:
    net = net_of(512, 12)
    optimizer = torch.optim.AdamW(net.parameters())
    if mode.startswith("offload"):
        residency.offload_optimizer(optimizer, bucket=mode.partition(" ")[2])
    for _ in range(3):
        net(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with residency.phase("rollout"):
            megabytes(40)


@case("96MiB")
def free_bytes_in_pieces(mode: str) -> None:
    pieces = [megabytes(6) for _ in range(12)]
    with residency.phase("rest"):
        kept = [pieces[index] for index in (0, 5, 6, 11)]  # one a segment, two far apart
        del pieces
        megabytes(22)
    del kept


@case("40MiB")
def a_base_model_again(mode: str) -> None:
    trained = net_of(512, 24)
    for parameter in trained.parameters():
        parameter.requires_grad = False
    if mode == "one model":
        del trained
    net_of(512, 24)


@case("48MiB")
def an_average_on_the_device(mode: str) -> None:
    net = net_of(512, 12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    average = copy.deepcopy(net)
    if mode == "one model":
        average.cpu()
    for _ in range(3):
        net(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with residency.phase("rollout"):
            megabytes(28)
    del average


@case("64MiB")
def a_copy_in_its_midst(mode: str) -> None:
    net = net_of(512, 40)
    with residency.phase("set up"):
        if mode == "park":
            residency.park(net)
        average = copy.deepcopy(net)
        if mode == "park":
            residency.unpark(net)
    del average


@case("64MiB")
def a_clone_for_a_save(mode: str) -> None:
    net = net_of(512, 12)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state.pop("step")
    with residency.phase("save"):
        saved = []
        for values in (net.state_dict(), *optimizer.state.values()):
            saved += [v.cpu() if mode == "snapshot" else v.clone() for v in values.values()]


@case("64MiB")
def gradients_beside_buckets(mode: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        view = mode == "view"
        net = nn.parallel.DistributedDataParallel(net_of(512, 24), gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.randn(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.distributed.destroy_process_group()


@case("64MiB")
def an_offload_with_a_large_bucket(mode: str) -> None:
    net = net_of(512, 24)
    optimizer = torch.optim.AdamW(net.parameters())
    bucket = mode.partition(" ")[2] if mode.startswith("smaller") else "64MiB"
    residency.offload_optimizer(optimizer, bucket=bucket)
    for _ in range(3):
        net(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@case("72MiB")
def an_offload_that_keeps_much(mode: str) -> None:
    net = net_of(512, 12)
    optimizer = torch.optim.AdamW(net.parameters())
    smaller = {"bucket": mode.partition(" ")[2]} if mode.startswith("smaller") else {}
    residency.offload_optimizer(
        optimizer,
        **{"bucket": "1MiB", "resident": "24MiB"}
        | smaller
        | ({"resident": "0B"} if smaller else {}),
    )
    for _ in range(3):
        net(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with residency.phase("rollout"):
            megabytes(44)


@case("44MiB")
def gradients_in_an_evaluation(mode: str) -> None:
    net = net_of(512, 12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        if mode == "zero_grad":
            optimizer.zero_grad()
        with residency.phase("evaluate"):
            megabytes(24)


@case("64MiB")
def cycles(mode: str) -> None:
    class Node:
        pass

    gc.disable()
    for _ in range(STEPS):
        with residency.phase("step"):
            node: Any = Node()
            node.itself, node.values = node, megabytes(3)
            del node
            if mode == "collect":
                gc.collect()


@case("96MiB")
def an_error_of_an_earlier_cell(mode: str) -> None:
    def cell(rows: int) -> None:
        net = net_of(512, 4)
        output = net(torch.randn(rows, 512, device="cuda"))
        output.square().mean().backward()

    try:
        cell(8192)
    except torch.OutOfMemoryError as error:
        sys.last_value = error
    if mode == "reclaim":
        residency.reclaim(errors=True)
    with residency.phase("again"):
        cell(2048)


@case("96MiB")
def an_error_that_is_kept(mode: str) -> None:
    failed = {}

    def run(rows: int) -> None:
        net_of(512, 4)(torch.randn(rows, 512, device="cuda")).square().mean().backward()

    for rate in (1, 2, 3):
        try:
            run(8192)
        except torch.OutOfMemoryError as error:
            failed[rate] = str(error) if mode == "text" else error
    with residency.phase("again"):
        run(2048)


@case("64MiB")
def a_batch_that_is_too_large(mode: str) -> None:
    train(net_of(256, 8), lambda output, loss: None, rows=1024 if mode == "batch" else 8192)


@case("32MiB")
def a_model_that_is_too_large(mode: str) -> None:
    net_of(512, 40)


@case("32MiB")
def one_request_that_is_too_large(mode: str) -> None:
    net = net_of()
    with residency.phase("rollout"):
        megabytes(64)
    del net


def run(name: str, mode: str, file: str) -> None:
    capacity, function = CASES[name]
    if mode == "segments":
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    residency.sim.enable(capacity, device="cuda", context="0B", workspaces=False)
    note = None
    try:
        with residency.record(f"{file}.jsonl"):
            function(mode)
    except torch.OutOfMemoryError as error:
        note = "\n".join(error.__notes__)
    with open(file, "w") as output:
        json.dump({"case": name, "mode": mode, "is_done": note is None, "note": note}, output)


def main(runs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(runs):
            name, _, mode = each.partition(":")
            file = f"{folder}/{number}"
            child = os.fork()
            if child == 0:
                run(name, mode, file)
                os._exit(0)
            os.waitpid(child, 0)
            with open(file) as result:
                print(result.read(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [f"{name}:" for name in CASES])
