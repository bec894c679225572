"""What the whole process shares: each registry is listed here, and keeps nothing alive."""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

from source_rules import parse_sources

from residency._registries import WeakRegistry

# Every mutable object of a module, and why it cannot grow without end or keep a tensor alive.
REGISTRIES = {
    "_checkpoint/_capture/_own_pairs.py:memory": "an attribute, which goes with its object",
    "_checkpoint/_background.py:_alive": "weak",
    "_checkpoint/_background.py:_interpreter": "a flag",
    "_checkpoint/_capture/_capture.py:_of_thread": "a thread's own, the index of its device",
    "_checkpoint/_disk/_dry.py:_observers": "those of a dry run's process, which it has one of",
    "_checkpoint/_disk/_dry.py:_zeros": "no registry: the bytes of a chunk, which nobody writes",
    "_checkpoint/_disk/_dry.py:_crc32_of_hole": "256 numbers",
    "_checkpoint/_disk/_lock.py:_locks": "weak",
    "_checkpoint/_disk/_read.py:_pools": "weak",
    "_checkpoint/_disk/_system.py:_in_use": "one entry",
    "_checkpoint/_disk/_system.py:_libc": "one entry",
    "_checkpoint/_restore/_boxes.py:whole_box": "256 shapes",
    "_checkpoint/_save.py:_exit": "a flag",
    "_checkpoint/_save.py:unreported": "failed saves that nobody was told of; no tensors",
    "_cli/_site/sitecustomize.py:_asked": "two entries",
    "_dryrun/_caught.py:caught": "the words of one error",
    "_dryrun/_evidence.py:_thread": "a thread's own, the id of a module whose pass is open",
    "_dryrun/_files.py:_watch": "one entry, of the process's own",
    "_dryrun/_loops.py:loops": "the loops that are under way, and ids of their frames",
    "_dryrun/_places.py:_texts": "names of texts that the script has run",
    "_dryrun/_ranks.py:be_first_rank": "one entry",
    "_dryrun/_saves.py:_state": "a flag for each thread",
    "_frozen/_guards.py:_lock": "a lock",
    "_frozen/_guards.py:_units": "weak keys; a unit keeps its module not alive",
    "_frozen/_passes.py:_autograd": "no registry: a module of torch's",
    "_handoff/_agreement.py:_given_up": "weak",
    "_handoff/_hand_off_job.py:_active": "weak",
    "_park/_park.py:_parkings": "weak keys",
    "_park/_guards.py:_lock": "a lock",
    "_park/_guards.py:_standing": "weak",
    "_park/_guards.py:_watch_steps": "one entry",
    "_park/_parking.py:_arenas": "weak keys",
    "_handoff/_peer.py:_links": "weak",
    "_handoff/_peer.py:_releasers": "one socket a path; no tensors",
    "_handoff/_peer.py:_takers": "one socket a path; no tensors",
    "_handoff/_segments.py:_toggle": "weak",
    "_memory/_holders/_holders.py:_say_that_there_is_none": "one entry",
    "_memory/_history.py:held_history": "64 pairs of numbers for each of 256 phases at most",
    "_memory/_phase.py:_open": "the phases that are open",
    "_memory/_phase.py:boundaries": "the ledgers that are open",
    "_module_calls.py:_lock": "a lock",
    "_module_calls.py:_watches": "functions of three modules",
    "_nesting.py:_marks": "one entry a function that is marked",
    "_optim/_offload.py:_classes": "weak keys; classes, no tensors",
    "_optim/_offload.py:_metaclass_of": "one entry a metaclass; no tensors",
    "_optim/_offloaded.py:_hooked_step": "a function",
    "_optim/_overlap/_account.py:_accounts": "weak values",
    "_optim/_overlap/_triggers.py:_lock": "a lock",
    "_optim/_overlap/_triggers.py:_watching": "weak",
    "_optim/_trial/_partial_step.py:_shadows": "weak",
    "_transfer/_owner.py:_visitors": "weak",
    "_pinned.py:_waits": "one entry a device; no tensors",
    "_report/_fields.py:_bytes": "a rule of the table",
    "_transfer/_events.py:_events": "as many events of a device as were in use at once",
    "_transfer/_gate.py:gates": "one entry a device, whose sources are weak",
    "_transfer/_host_memory.py:_libc": "one entry",
    "_transfer/_lanes.py:_lanes": "one entry a device",
    "_transfer/_lending.py:lending": "addresses, until a loan ends",
    "_transfer/_owner.py:_forecasters": "functions",
    "_transfer/_owner.py:_owned": "weak",
    "_transfer/_owner.py:_owners": "one entry a class of ours",
    "_transfer/_writers.py:_stepped": "weak",
    "_transfer/_writers.py:watch_optimizers": "one entry",
    "integrations/_verl_guard.py:_inside": "a thread's own, while a guarded method runs",
    "integrations/axolotl.py:_mixed_over": "one entry a trainer's class; no tensors",
    "integrations/axolotl.py:_module": "a module of Axolotl's",
    "integrations/dcp/_stager.py:_of_thread": "a thread's own, while it stages",
    "integrations/lightning/_trees.py:_class_with": "classes",
    "integrations/torchtitan/_overrides.py:_derive": "a function of torchtitan's",
    "integrations/torchtitan/_overrides.py:_override": "a function of torchtitan's",
    "integrations/transformers/_evaluation.py:_of_thread": "a thread's own, weak",
    "integrations/transformers/_evaluation.py:_users": "weak",
    "_transfer/_waiting.py:_any_away": "one entry",
    "_transfer/_waiting.py:_away": "one entry",
    "_transfer/_waiting.py:_lock": "a lock",
    "_transfer/_waiting.py:_looks": "a number for each thread",
    "_transfer/_waiting.py:_records": "weak keys",
    "integrations/trl.py:_flushes": "one function of TRL's",
    "integrations/trl.py:_in_sync": "a thread's own, while it syncs weights",
    "integrations/trl.py:_installed": "weak",
    "integrations/_verl_guard.py:_lock": "a lock",
    "integrations/verl.py:_makers": "one entry",
    "integrations/xtuner.py:_config_class": "one entry",
    "optim.py:_classes": "one entry",
    "residency_sim/_meta_kernels.py:_registrations": "one entry",
    "residency_sim/_allocator.py:_pool_numbers": "a counter",
    "residency_sim/_backend.py:_state": "one entry a setting",
}
_IMMUTABLE = (
    "frozenset", "logging.getLogger", "MappingProxyType", "namedtuple", "parse_bytes", "re.compile",
    "struct.Struct", "torch.complex", "torch.device", "tuple", "TypeVar",
)  # fmt: skip


def found_registries() -> Iterator[str]:
    for file, tree in parse_sources().items():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                name = ast.unparse(target)
                if _is_mutable(node.value) and name.lower() == name and name[:2] != "__":
                    yield f"{file}:{name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                "cache" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield f"{file}:{node.name}"


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return not ast.unparse(value.func).startswith(_IMMUTABLE)
    return isinstance(value, ast.Dict | ast.List | ast.Set)


def test_every_registry_of_the_process_is_listed_with_its_reason() -> None:
    assert set(found_registries()) == set(REGISTRIES)


class Thing:
    pass


def test_a_registry_keeps_nothing_alive_and_forgets_by_identity() -> None:
    registry: WeakRegistry[Any] = WeakRegistry()
    kept, let_go = Thing(), Thing()
    for thing in (kept, let_go, kept):
        registry.add(thing)
    assert len(registry) == 2
    del let_go, thing
    gc.collect()
    assert list(registry) == [kept]
    assert kept in registry
    assert Thing() not in registry
    registry.discard(kept)
    registry.discard(kept)
    assert kept not in registry
    registry.add(kept)
    registry.clear()
    assert list(registry) == []


def hammer(num_threads: int, work: Callable[[int], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_add_and_discard_while_others_iterate(frequent_switches: None) -> None:
    registry: WeakRegistry[Any] = WeakRegistry()
    stay = [Thing() for _ in range(200)]
    for thing in stay:
        registry.add(thing)

    def work(number: int) -> None:
        for _ in range(300):
            if number % 2:
                registry.add(passing := Thing())
                registry.discard(passing)
                registry.add(Thing())  # dies at once
            else:
                assert set(map(id, registry)) >= set(map(id, stay))

    assert hammer(6, work) == []
    assert set(map(id, registry)) == set(map(id, stay))


def test_an_iteration_has_what_was_there_when_it_began_whatever_comes_and_goes() -> None:
    registry: WeakRegistry[Any] = WeakRegistry()
    there = [Thing(), Thing()]
    for thing in there:
        registry.add(thing)
    seen, added = [], []
    for thing in registry:
        seen.append(thing)
        registry.clear()
        registry.add(late := Thing())
        added.append(late)
    assert seen == there
    assert list(registry) == added[-1:]
