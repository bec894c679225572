"""bitsandbytes' 8-bit classes, whose parameters share the tables of their states, stream in as many
buckets as any other class, on every way in."""

import copy

import pytest
import torch

import residency
from residency._storages import overlapping


def made(name, **options):
    """Imported by the tests alone: it takes seconds, and each process collects every test."""
    optim = pytest.importorskip("bitsandbytes.optim")
    return lambda parameters: getattr(optim, name)(parameters, **options)


CLASSES = {
    "AdamW8bit": lambda ps: made("AdamW8bit", lr=1e-2)(ps),
    "Lion8bit": lambda ps: made("Lion8bit", lr=1e-3)(ps),
}
BUCKETS = {"AdamW8bit": "20KiB", "Lion8bit": "10KiB"}  # the state of one parameter, with its tables
SHAPES = ((64, 128),) * 4
STEPS = 6


def plain_run(lab, make):
    parameters = lab.parameters(shapes=SHAPES)
    optimizer = make(parameters)
    lab.take_steps(optimizer, parameters, range(STEPS), missing=False)
    return lab.read(optimizer, parameters)


def before_a_step(lab, make, parameters, bucket, path):
    optimizer = residency.offload_optimizer(make(parameters), bucket=bucket)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    return optimizer


def after_a_step(lab, make, parameters, bucket, path):
    optimizer = make(parameters)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    return residency.offload_optimizer(optimizer, bucket=bucket)


def loaded(lab, make, parameters, bucket, path):
    optimizer = make(parameters)
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    fresh = residency.offload_optimizer(make(parameters), bucket=bucket)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return fresh


def restored(lab, make, parameters, bucket, path, offload=lambda optimizer: optimizer):
    optimizer = offload(make(parameters))
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    fresh = residency.offload_optimizer(make(parameters), bucket=bucket)
    with residency.Checkpointer(path) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer}).wait()
        checkpointer.restore({"optimizer": fresh})
    return fresh


def restored_from_an_offloaded_one(*args):
    return restored(*args, offload=residency.offload_optimizer)


WAYS = [before_a_step, after_a_step, loaded, restored, restored_from_an_offloaded_one]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_share_a_table_stream_each_in_a_bucket_of_its_own(lab, tmp_path, kind, way):
    parameters = lab.parameters(shapes=SHAPES)
    optimizer = way(lab, CLASSES[kind], parameters, BUCKETS[kind], tmp_path)
    lab.take_steps(optimizer, parameters, range(2, STEPS), missing=False)
    assert optimizer.statistics().num_buckets == len(SHAPES)
    tensors = [v for p in parameters for v in optimizer.state[p].values() if torch.is_tensor(v)]
    assert not overlapping(tensors)
    lab.assert_equal(lab.read(optimizer, parameters), plain_run(lab, CLASSES[kind]))


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("offload", [lambda o: o, residency.offload_optimizer])
def test_a_plain_one_resumes_from_a_save(lab, tmp_path, make, offload):
    parameters = lab.parameters(shapes=SHAPES)
    optimizer = offload(make(parameters))
    lab.take_steps(optimizer, parameters, range(2), missing=False)
    fresh = make(parameters)
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer}).wait()
        checkpointer.restore({"optimizer": fresh})
    lab.take_steps(fresh, parameters, range(2, STEPS), missing=False)
    lab.assert_equal(lab.read(fresh, parameters), plain_run(lab, make))
