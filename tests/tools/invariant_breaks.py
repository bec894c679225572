"""For each invariant that a docstring states: a change that breaks it, and a test that sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """A change of the library.

    Attributes:
        module: Whose docstring states the invariant, below ``src/residency``.
        test: What pytest is given: it fails on the change.
        was: What stands once in the changed file.
        now: What takes its place.
        file: The changed file, where that is another one.
    """

    module: str
    test: str
    was: str
    now: str
    file: str = ""

    @property
    def changed(self) -> str:
        """The file that is changed."""
        return self.file or self.module


BREAKS = (
    Break(
        "_optim/_overlap/_schedule.py",
        "tests/optim/test_schedule.py -k passes_and_the_slots",
        "        return max(self.peak - level - climb, 0)\n",
        "        return max(self.peak - level, 0)\n",
    ),
    Break(
        "_optim/_overlap/_ahead.py",
        "tests/optim/test_overlap.py -k anything_between",
        "        if self._blocks:\n            with",
        "        if False:\n            with",
    ),
    Break(
        "_park/_parked.py",
        "tests/park/test_parked.py",
        "        let_go_of(error)\n",
        "",
    ),
    Break(
        "_dtensor.py",
        "tests/optim/test_distributed.py",
        "    if not is_sharded(model) or is_sharded(local):\n        return local\n",
        "    return local\n",
    ),
    Break(
        "_checkpoint/_document/_kinds.py",
        "tests/checkpoint/restore/test_kinds.py",
        "    found = _BY_TYPE.get(type(value))\n",
        "    found = next((_BY_TYPE[k] for k in type(value).__mro__ if k in _BY_TYPE), None)\n",
    ),
    Break(
        "_checkpoint/_document/_encode.py",
        "tests/checkpoint/restore/test_kinds.py -k encoded_shares_nothing",
        '    copied = numpy.array(value, order="F" if is_turned else "C", ndmin=1)\n',
        "    copied = numpy.atleast_1d(value)\n",
        "_checkpoint/_document/_kinds.py",
    ),
    Break(
        "_checkpoint/_background.py",
        "tests/checkpoint/test_background.py",
        "    if not is_taken.acquire(blocking=False):\n        return\n",
        "    is_taken.acquire(blocking=False)\n",
    ),
    Break(
        "_checkpoint/_capture/_capture.py",
        "tests/integrations/test_dcp_stager.py -k share_one_set",
        "            self._arena.release(self.region)\n",
        "            pass\n",
    ),
    Break(
        "_checkpoint/_capture/_blocks.py",
        "tests/checkpoint/test_snapshot.py -k ties_and_views",
        "        if each.first < reach:\n",
        "        if each.first < 0:\n",
    ),
    Break(
        "_checkpoint/_save_memory.py",
        "tests/checkpoint/test_checkpointer.py -k policy",
        "        return self.job is None or self.job.save.is_done()\n",
        "        return True\n",
    ),
    Break(
        "_checkpoint/_checkpointer.py",
        "tests/checkpoint/test_failed_saves.py",
        "    unreported[:] = [save for save in unreported if save not in mine]\n",
        "",
        "_checkpoint/_save.py",
    ),
    Break(
        "_checkpoint/_disk/_write.py",
        "tests/checkpoint/disk/test_alignment.py",
        "        chunk.file.crc32[chunk.index] = image.crc32(self._system)\n",
        "        chunk.file.crc32[chunk.index] = crc32(image.buffers(padded=False)[0], 0)\n",
    ),
    Break(
        "_checkpoint/_disk/_read.py",
        "tests/checkpoint/restore/test_read.py -k flipped",
        "        if task.crc32 is not None and crc != task.crc32:\n",
        "        if False:\n",
    ),
    Break(
        "_checkpoint/_disk/_read.py",
        "tests/checkpoint/restore/test_read.py -k interrupted",
        "                        thread.join()\n                is_over = True\n",
        "                        pass\n                is_over = True\n",
    ),
    Break(
        "_pinned.py",
        "tests/transfer/test_page_locking.py",
        "                _wait_for_copies()\n                _Left.ranges",
        "                _Left.ranges",
    ),
    Break(
        "_checkpoint/_disk/_marks.py",
        "tests/checkpoint/disk/test_foreign.py",
        "        if _has_kind(system, folder / name, stat.S_ISREG):\n",
        "        if True:\n",
    ),
    Break(
        "_checkpoint/_restore/_plan.py",
        "tests/checkpoint/restore/test_document.py -k left_alone_where",
        "        self.targets.append(target)\n",
        "        target.local.zero_()\n        self.targets.append(target)\n",
    ),
    Break(
        "_checkpoint/_restore/_overlaps.py",
        "tests/checkpoint/restore/test_overlaps.py",
        "                problems.append(_conflict(*pair))\n",
        "                pass\n",
    ),
    Break(
        "_checkpoint/_restore/_fill.py",
        "tests/checkpoint/restore/test_fill.py -k gate",
        "        mover.before_write(tensors)\n",
        "",
    ),
    Break(
        "_transfer/_waiting.py",
        "tests/checkpoint/restore/test_waiting.py -k touches_the_state",
        "                if mapping is state:\n",
        "                if mapping is not state:\n",
    ),
    Break(
        "_checkpoint/_restore/_document.py",
        "tests/checkpoint/restore/test_document.py -k left_alone_where",
        "        self._plan.after.append(partial(_put_mapping, state, parts, None))\n",
        "        _put_mapping(state, parts, None)\n",
    ),
    Break(
        "_registries.py",
        "tests/test_registries.py",
        "iter([thing for ref in self._refs.copy().values() if (thing := ref()) is not None])",
        "(thing for ref in self._refs.values() if (thing := ref()) is not None)",
    ),
    Break(
        "_storages.py",
        "tests/test_storages.py",
        "        count = 1 + sum((size - 1) * stride for size, stride in steps)\n",
        "        count = sum(size * stride for size, stride in steps)\n",
    ),
    Break(
        "_modes.py",
        "tests/test_storages.py -k modes_off",
        "        torch.inference_mode(mode=False),\n",
        "",
    ),
    Break(
        "_park/_loads.py",
        "tests/park/test_loads.py -k follows_its_parameters",
        "        let_wait(self, _following(self), _move)\n",
        "        pass\n",
    ),
    Break(
        "_optim/_exchange.py",
        "tests/optim/test_train_and_eval.py -k random_programs",
        "            if key in at_home or dict.get(inner, key) is not value:\n",
        "            if key not in at_home and dict.get(inner, key) is not value:\n",
    ),
    Break(
        "_park/_parking.py",
        "tests/park/test_failures.py",
        "            undo(move.rebound, move.before)\n",
        "            pass\n",
        "_park/_storages.py",
    ),
    Break(
        "_park/_storages.py",
        "tests/park/test_park.py -k hooks_and_nodes",
        "            self._other = body\n            _swap(tensor, body)\n",
        "            self._other = body\n            tensor.data = view\n",
    ),
    Break(
        "_optim/_plan.py",
        "tests/optim/test_small_tensors.py -k few_calls_for_each",
        "    unit.loads, unit.stores = _join(loads), _join(stores)\n",
        "    unit.loads, unit.stores = [r for r, _ in loads], [r for r, _ in stores]\n",
    ),
    Break(
        "_optim/_offload.py",
        "tests/optim/test_interrupted_moves.py -k all_or_nothing",
        "        optimizer.__class__ = offload.base\n        optimizer.__dict__.clear()\n"
        "        optimizer.__dict__.update(before)\n",
        "        optimizer.__class__ = offload.base\n",
    ),
    Break(
        "_optim/_wrappers.py",
        "tests/optim/stacks/test_accelerate.py",
        '            inner.__dict__["step"] = patch\n',
        "            pass\n",
    ),
    Break(
        "_optim/_unit_step.py",
        "tests/optim/test_interruptions.py",
        "        for change in self._changes:\n            if change.is_evicted:\n",
        "        for change in [self._changes.pop(0) for _ in list(self._changes)]:\n"
        "            if change.is_evicted:\n",
    ),
    Break(
        "_optim/_masters.py",
        "tests/optim/test_masters.py -k counts",
        "    torch.where(is_foreign, low.float(), master, out=master)\n",
        "",
    ),
    Break(
        "_optim/_receive.py",
        "tests/checkpoint/restore/test_interrupted.py",
        "            received.targets[parameter, key] = target\n",
        "            received.targets[parameter, key] = target\n"
        "            offload.on_host.state.of(parameter).forget(key)\n",
    ),
    Break(
        "_optim/_state.py",
        "tests/optim/test_state.py -k final_values",
        "            self.written.synchronize()  # the caller reads homes, or writes into them\n",
        "",
    ),
    Break(
        "_optim/_homes.py",
        "tests/optim/test_kept_states.py",
        "            and not lending.is_lent(home.tensor)\n",
        "",
    ),
    Break(
        "_optim/_step_patch.py",
        "tests/optim/test_hooks.py -k scheduler",
        '    if optimizer.__dict__.pop("step", None) is not None:\n'
        "        patch_for_scheduler(optimizer)\n",
        '    optimizer.__dict__.pop("step", None)\n',
    ),
    Break(
        "_optim/_lend.py",
        "tests/checkpoint/test_checkpointer.py -k lent",
        "            if region is None and is_lasting:\n",
        "            if region is None:\n",
        "_optim/_homes.py",
    ),
    Break(
        "_optim/_apart.py",
        "tests/optim/test_shared_states.py -k entry",
        "        if found is not None and not found.has_entry:\n",
        "        if found is not None:\n",
        "_optim/_homes.py",
    ),
    Break(
        "_optim/_placement.py",
        "tests/optim/test_moves.py -k masters_stays",
        "    except BaseException:\n        optimizer.state = before\n        raise\n",
        "    except BaseException:\n        raise\n",
    ),
    Break(
        "_optim/_loading.py",
        "tests/optim/test_state.py -k load",
        "    prepared = PreparedLoad(repaired.param_groups, attributes, "
        "Residents(offload.resident_bytes))\n",
        "    prepared = PreparedLoad(repaired.param_groups, attributes, "
        "Residents(offload.resident_bytes))\n    optimizer.param_groups = repaired.param_groups\n",
    ),
    Break(
        "_optim/_trial/_partial_step.py",
        "tests/optim/test_foreign.py -k in_place",
        "        if is_copied:\n",
        "        if False:\n",
    ),
    Break(
        "_optim/_trial/_separable.py",
        "tests/optim/test_foreign.py -k by_chance",
        "            torch.set_rng_state(before)\n",
        "            pass\n",
        file="_optim/_trial/_generators.py",
    ),
    Break(
        "_optim/_trial/_first_step.py",
        "tests/optim/test_foreign.py -k tried_out",
        "torch.enable_grad(), generators_kept():\n",
        "torch.enable_grad():\n",
    ),
    Break(
        "_optim/_trial/_copies.py",
        "tests/optim/test_foreign.py -k shared_and_not_cloned",
        "    return tensor.clone() if tensor.is_cpu and tensor.numel() == 1 else tensor\n",
        "    return tensor.clone()\n",
    ),
    Break(
        "_optim/_places.py",
        "tests/optim/test_bounds.py -k keeps_to_its_bound",
        "        if others + num_bytes > self._budget_bytes:\n",
        "        if num_bytes > self._budget_bytes:\n",
    ),
    Break(
        "_optim/_offloaded.py",
        "tests/optim/test_refusals.py -k bound_before",
        "    offload.guard = optimizer.register_step_pre_hook(refuse_foreign_step)\n",
        "    offload.guard = optimizer.register_step_pre_hook(lambda *_: None)\n",
        "_optim/_offload.py",
    ),
    Break(
        "_transfer/_events.py",
        "tests/transfer/test_events.py -k left_as_it_is",
        "    if sys.getrefcount(event) == _REFERENCES_OF_ONE:\n",
        "    if True:\n",
    ),
    Break(
        "_transfer/_lending.py",
        "tests/transfer/test_lending.py",
        "            if borrower is None or not left:\n",
        "            if True:\n",
    ),
    Break(
        "_transfer/_moves.py",
        "tests/optim/test_moves.py -k none_under_way",
        "        mover.settle()\n",
        "",
    ),
    Break(
        "_transfer/_host_ring.py",
        "tests/transfer/test_host_ring.py -k read_when_they_are_there",
        "            mover.follow_to_host(each.source.ready)\n",
        "",
    ),
    Break(
        "_transfer/_mover.py",
        "tests/transfer/test_mover.py -k unread",
        "            self._gate.before_write(over, stream=lane)\n",
        "            pass\n",
    ),
    Break(
        "_transfer/_mover.py",
        "tests/transfer/test_mover.py -k kept",
        "        self._gate.before_free(sources)\n",
        "        pass\n",
    ),
    Break(
        "_transfer/_mover.py",
        "tests/transfer/test_mover.py -k left_behind",
        "            idle.synchronize()\n",
        "",
    ),
    Break(
        "_transfer/_gate.py",
        "tests/transfer/test_gate.py -k one_entry",
        "            each.storages.difference_update(read.storages)\n",
        "            pass\n",
    ),
    Break(
        "_transfer/_slab.py",
        "tests/transfer/test_slab.py -k last_view",
        "        weakref.finalize(buffer, self.release, region).atexit = False\n",
        "        self.release(region)\n",
    ),
    Break(
        "_transfer/_lanes.py",
        "tests/transfer/test_lanes.py -k made_once",
        "    if device not in _lanes:\n",
        "    if True:\n",
    ),
    Break(
        "integrations/xtuner.py",
        "tests/integrations/test_xtuner.py -k what_xtuner_would",
        "            optimizer = base.build(plain, model)\n",
        "            optimizer = base.build(plain, model)\n"
        "            optimizer.param_groups[0]['lr'] *= 2\n",
    ),
    Break(
        "integrations/dcp/_stager.py",
        "tests/integrations/test_dcp_stager.py -k values_of_its_call",
        "    weakref.finalize(memory.obj, flight.give_back, held).atexit = False\n",
        "    flight.give_back(held)\n",
    ),
    Break(
        "integrations/dcp/_train_state.py",
        "tests/integrations/test_dcp_training.py -k before_anything_is_read",
        "        about = dict.fromkeys(self._contents(values), True)\n",
        "        about = {}\n",
    ),
    Break(
        "integrations/torchtitan/_optimizers.py",
        "tests/integrations/test_torchtitan.py -k bfloat16",
        "            if config.implementation == _IN_BFLOAT16:\n",
        "            if False:\n",
    ),
    Break(
        "integrations/torchtitan/_published.py",
        "tests/integrations/test_torchtitan.py -k version_without",
        '    return hook_in(found, name, distribution="torchtitan", remedy=_NEWER)\n',
        "    return getattr(found, name, None)\n",
    ),
    Break(
        "integrations/torchtitan/_overrides.py",
        "tests/integrations/test_torchtitan.py -k means_nothing",
        "    if unknown:\n",
        "    if False:\n",
    ),
    Break(
        "integrations/torchtitan/_plain.py",
        "tests/integrations/test_torchtitan.py -k torchtitan_wrote",
        'found |= {f"param_groups.{name}.{key}": each for',
        'found |= {f"param_groups.{key}": each for',
    ),
    Break(
        "integrations/torchtitan/_checkpoints.py",
        "tests/integrations/test_torchtitan.py -k last_save",
        "lambda local: local.cpu().to(dtype)",
        "lambda local: local.to(dtype)",
    ),
    Break(
        "integrations/_common/_pickled.py",
        "tests/integrations/test_pickled.py",
        '            return self._put_aside(value.detach().to("cpu", copy=True))\n',
        '            return self._put_aside(value.detach().to("cpu"))\n',
    ),
    Break(
        "integrations/_common/_ordered_writes.py",
        "tests/integrations/test_lightning.py -k told_together",
        "            self._num_raised = self._num_failed\n",
        "            pass\n",
    ),
    Break(
        "integrations/llamafactory.py",
        "tests/integrations/test_llamafactory.py",
        '    base = _class_named(optim_config.get(_BUILT, "AdamW"))\n',
        '    base = _class_named(optim_config.get(_BUILT, "Adam"))\n',
    ),
    Break(
        "integrations/prime_rl.py",
        "tests/integrations/test_prime_rl.py -k before_anything_is_built",
        "        _refuse_own_offloads(kwargs)\n",
        "",
    ),
    Break(
        "integrations/axolotl.py",
        "tests/integrations/test_axolotl.py",
        "        if unknown:\n",
        "        if False:\n",
    ),
    Break(
        "integrations/trl.py",
        "tests/integrations/test_trl_engine.py",
        "                return sync_weights(*args, **kwargs)\n",
        "                return None\n",
    ),
    Break(
        "integrations/_verl_guard.py",
        "tests/integrations/test_verl_door.py -k critics_update",
        "            return result\n",
        "            return None\n",
    ),
    Break(
        "integrations/transformers/_callback.py",
        "tests/integrations/test_transformers.py",
        "            self._put.pop().take_off()\n",
        "            self._put.pop()\n",
    ),
    Break(
        "integrations/transformers/_saves.py",
        "tests/integrations/test_transformers.py",
        "        SYSTEM.rename(self.folder, self.final)\n",
        "        shutil.copytree(self.folder, self.final)\n",
    ),
    Break(
        "integrations/transformers/_evaluation.py",
        "tests/integrations/test_transformers.py",
        "            rows[:, part.shape[1] :] = padding_index\n",
        "            rows[:, part.shape[1] :] = 0\n",
    ),
)
