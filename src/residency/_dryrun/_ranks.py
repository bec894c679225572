"""One rank of many in one process: groups whose peers are not there.

Collectives take the memory that they take, and move no bytes. What is gathered as Python objects
is this rank's own, once for each rank; what another rank would send stays as it was.
"""

from __future__ import annotations

import builtins
import functools
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import torch.distributed as dist

# The group of torch's own tests that has no peers: it has no public name.
from torch._C._distributed_c10d import FakeProcessGroup, HashStore
from torch.distributed import distributed_c10d

from residency._dryrun._methods import around
from residency._memory import ImportWatch
from residency_sim import dry_run

_PORT = "29500"  # no process listens there
_MOST_DEVICES = 8  # of one machine


def devices_of(num_ranks: int) -> int:
    """Returns how many devices a machine with so many ranks shows; only the first has tensors."""
    return min(num_ranks, _MOST_DEVICES)


def be_one_rank(num_ranks: int) -> None:
    """Makes ``torch.distributed`` believe that the other ranks are there.

    Args:
        num_ranks: How many there are; 1 where launchers say it.
    """
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", _PORT)
    names: Any = vars(distributed_c10d)
    gloo, nccl = names["ProcessGroupGloo"], names["ProcessGroupNCCL"]
    changed = {
        "ProcessGroupGloo": _without_peers(gloo),
        "ProcessGroupNCCL": _without_peers(nccl, wrap=nccl),
    }
    for name, function in _objects().items():
        changed[name] = around(names[name])(function)
    changed["rendezvous"] = around(names["rendezvous"])(_meet_nobody)
    distributed_c10d.__dict__.update(changed)
    dist.__dict__.update({name: each for name, each in changed.items() if name in vars(dist)})
    # Calls are numbered to find ranks that have made different ones; a group without peers cannot.
    group: Any = FakeProcessGroup
    count = group._set_sequence_number_for_group
    group._set_sequence_number_for_group = around(count)(lambda self: None)
    unlimited = around(gloo._set_default_timeout, names=("self", "timeout"))
    group._set_default_timeout = unlimited(lambda self, unused: None)
    here = functools.partial(_launch_here, num_ranks)
    watched: dict[str, Callable[[ModuleType], None]] = {"torch.distributed.launcher.api": here}
    if num_ranks > 1:
        watched["torch.distributed.checkpoint.default_planner"] = _accept_plans
        watched["torch.multiprocessing.spawn"] = functools.partial(_spawn_first, num_ranks)
    ImportWatch(watched).start()


@functools.cache
def be_first_rank() -> None:
    """Gives a process without a group the rank 0; once a process.

    An evaluation that was cut counts fewer samples than its data has. Scripts ask then which rank
    is to warn of it, some without a look for a group: a whole evaluation never comes there.
    """
    names: Any = vars(distributed_c10d)
    ask = names["get_rank"]

    @around(ask)
    def get_rank(group: Any = None) -> int:
        is_alone = group is None and not dist.is_initialized()
        rank: int = 0 if is_alone else ask(group)
        return rank

    for module in (distributed_c10d, dist):
        module.__dict__["get_rank"] = get_rank


def _meet_nobody(
    url: str, rank: int = -1, world_size: int = -1, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    rank = rank if rank >= 0 else int(os.environ.get("RANK", 0))
    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", 1))
    yield HashStore(), rank, size


def _without_peers(group: Any, wrap: Any = None) -> Any:
    class Alone(type(group)):  # type: ignore[misc]
        """A type that knows the groups that the real one makes."""

        def __instancecheck__(self, value: object) -> bool:
            return isinstance(value, group | FakeProcessGroup)

    class Group(metaclass=Alone):
        """The class whose groups have no peers."""

        Options = getattr(group, "Options", getattr(group, "_Options", None))
        _Options = Options
        create_default_device = getattr(group, "create_default_device", None)
        create_device = getattr(group, "create_device", None)

        def __new__(cls, store: Any, rank: int, size: int, *args: object, **options: object) -> Any:
            alone = FakeProcessGroup._create_internal(rank, size)
            return alone if wrap is None else wrap.of_host_group(alone)

    return Group


def _objects() -> dict[str, Callable[..., Any]]:
    """Returns the exchanges that need a peer: an object comes from one, or in parts.

    What is gathered needs none: its bytes are this rank's own, and known.
    """

    def broadcast_object_list(object_list: list[Any], *args: object, **options: object) -> None:
        pass

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *args: object,
        **options: Any,
    ) -> None:
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    def monitored_barrier(*args: object, **options: object) -> None:
        pass

    return {
        "broadcast_object_list": broadcast_object_list,
        "scatter_object_list": scatter_object_list,
        "monitored_barrier": monitored_barrier,
    }


def _accept_plans(module: ModuleType) -> None:
    """Accepts the plans of a distributed checkpoint, of which all but this rank's are copies."""
    check = vars(module)["_validate_global_plan"]
    module.__dict__["_validate_global_plan"] = around(check)(lambda plan, metadata: [])


def _spawn_first(num_ranks: int, module: ModuleType) -> None:
    """Starts the first process alone of a script that starts one for each rank."""
    start = vars(module)["start_processes"]

    @around(start)
    def start_processes(
        fn: object, args: object = (), nprocs: int = 1, *others: object, **options: object
    ) -> object:
        is_each_rank = nprocs in (num_ranks, devices_of(num_ranks))
        return start(fn, args, 1 if is_each_rank else nprocs, *others, **options)

    module.__dict__["start_processes"] = start_processes


class _UncachedLoader(SourceFileLoader):
    """The loader of a script, whose code is kept nowhere."""

    def set_data(self, path: str, data: Any, **options: object) -> None:
        """Leaves a folder without a cache, as where Python runs a script itself."""


def _run_script(file: str) -> None:
    """Runs a script as Python runs one, by a loader: its loops can be ended (``_rewriting``)."""
    if os.path.isdir(file):
        runpy.run_path(file, run_name="__main__")
        return
    file = os.path.abspath(file)
    code: Any = _UncachedLoader("__main__", file).get_code("__main__")
    launcher, module = sys.modules["__main__"], ModuleType("__main__")
    vars(module).update(__file__=file, __builtins__=builtins)
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    finally:
        sys.modules["__main__"] = launcher


def _launch_here(num_ranks: int, module: ModuleType) -> None:
    """Makes ``torchrun`` and what calls it run the script in this process, as the first rank."""

    @around(vars(module)["launch_agent"])
    def launch_agent(
        config: Any, entrypoint: Any, args: list[Any], *others: object, **options: object
    ) -> dict[int, object]:
        size = max(num_ranks, config.nproc_per_node * config.max_nodes)
        os.environ.update(RANK="0", LOCAL_RANK="0", GROUP_RANK="0", WORLD_SIZE=str(size))
        os.environ["LOCAL_WORLD_SIZE"] = str(config.nproc_per_node)
        # Nothing is on a device yet: the script has yet to begin.
        dry_run.set_num_devices(devices_of(max(num_ranks, config.nproc_per_node)))
        if callable(entrypoint):
            return {0: entrypoint(*args)}
        words = [word for word in args if word != "-u"]
        is_module = words[0] == "-m"
        script, *given = words[is_module:]
        sys.argv = [script, *given]
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            _run_script(script)
        return {}

    module.__dict__["launch_agent"] = launch_agent
