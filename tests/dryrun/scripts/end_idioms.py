"""Brings the training loops of ``idioms.py`` to their end on the CPU, each in a fork of its own.

Prints a line of JSON for each: what was seen of it, and how it ended.
"""

import importlib
import json
import os

from residency._dryrun._rewriting import rewrite_loops
from residency._dryrun._stopping import Stopping
from residency._dryrun._telling import EnoughSeen

rewrite_loops()
idioms = importlib.import_module("idioms")  # this file itself is loaded as it is

IDIOMS = """
over_a_loader epochs steps_until_the_last next_of_an_iterator a_generator_that_cycles
a_generator_as_a_loader no_loader forever epochs_without_a_loader a_function_of_its_own
accumulation two_optimizers a_progress_bar a_stream early_return resumed a_resume_in_the_loop
resumes_without_end a_loop_that_comes_last steps_by_hand gradients_before_the_optimizer
a_long_evaluation accumulation_over_epochs pairs_of_loaders_over_epochs evaluations_with_workers
averages_over_batches folds epochs_of_many_steps a_library_that_looks_ahead the_last_of_a_try
samples_that_are_counted the_last_of_a_function a_training_and_another stages_of_an_epoch
critics_of_two_optimizers an_endless_while_with_an_else cycles_in_a_zip as_long_as_it_learns
sweeps_without_end made_in_the_first_round a_loop_of_a_library a_generator_that_trains
phases_of_an_epoch a_value_that_leaves_an_endless_loop steps_in_another_thread epochs_around_a_map
critics_of_two_trainings epochs_in_threads
"""

for idiom in (vars(idioms)[name] for name in IDIOMS.split()):
    if os.fork():
        os.wait()
        continue
    if idiom.__name__ not in ("steps_by_hand", "gradients_before_the_optimizer"):
        has_both = "two" in idiom.__name__ or "stages" in idiom.__name__
        idioms.optimizers[:] = [idioms.FIRST, idioms.SECOND] if has_both else [idioms.FIRST]
    stopping = idioms.stopping = Stopping(2, idioms.optimizers, lambda: sum(idioms.kept))
    stopping.start()
    ended = "finished"
    try:
        idiom()
    except EnoughSeen:
        ended = "left"
    except Exception as error:
        ended = repr(error)
    seen = idioms.seen
    found = {"name": idiom.__name__, "ended": ended, "steps": seen.count("step"), "seen": seen}
    found |= {"counted": stopping.state.num_steps, "was_cut": stopping.was_cut}
    print(json.dumps(found), flush=True)
    os._exit(0)
