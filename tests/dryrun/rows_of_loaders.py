"""Scripts as people write them, as events (`event_lists.read`): loaders.

Each was once ended too early or too late, or holds a condition of the reducer that no other one
holds: `test_steering_breaks.py` breaks each of them.
"""

ROWS = {
    "a library begins its loops anew: they are ended again, and then it is left": """
        made A
        step A @ items+
        batch L for library
        in library
        step A @ items+ -> end items, stop_trainers
        backward
        step A @ again+ -> end again
        = num_trainings 0
        backward
        stepping A @ again+ -> leave
    """,
    "a library that looks ahead has one more batch, and no second one": """
        made A
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        batch L for library -> no_batch
        step A
        stepping A -> leave
    """,
    "two optimizers of a library that looks ahead": """
        made A
        made B
        batch L for library
        step A
        step B
        batch L for library
        step A
        step B -> stop_trainers
        batch L for library -> no_batch
        step A
        step B
        stepping B -> leave
    """,
    "a library that looks ahead over a loader that is gone": """
        made A
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        drained
        gone L
        stepping A -> leave
    """,
    "a library that looked ahead trains again": """
        made A
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        step A
        begun
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        step A
        stepping A -> leave
    """,
    "a Trainer: begins, is asked to stop, evaluates, begins again": """
        begun
        made A
        passing L for library
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        40 x batch L for library -> no_batch
        passing V for library
        batch V for library
        begun
        passing L for library
        batch L for library
        step A
        = num_steps 3
        = has_framework true
        = have_ended true
    """,
    "an evaluation on the data of the training before": """
        made A
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        begun
        batch M for library
        step A
        batch M for library
        step A -> stop_trainers
        batch M for library -> no_batch
        passing L for library
        batch L for library
    """,
    "a library's loop that waits for a batch of a loader that is over: left": """
        made A
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        1000 x passing L for library -> no_batch
        passing L for library -> no_batch, leave
    """,
    "such loops are counted for each training": """
        made A
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        999 x passing L for library -> no_batch
        begun
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        1000 x passing L for library -> no_batch
    """,
    "batches for the script are given after the end": """
        made A
        batch L @ items+
        step A @ items
        batch L @ items+
        step A @ items -> end items, stop_trainers
        batch L @ items
        passing L @ items
        batch L @ items
        passing L
        batch L
    """,
    "a loader that is no one's of steps is given to a library after the end": """
        made A
        batch L for library
        step A
        batch L for library
        step A -> stop_trainers
        passing V for library
        batch V for library
        batch L for library -> no_batch
    """,
    "after the loops are left a library gets batches of the same loader": """
        made A
        batch L for library @ items+
        step A @ items
        batch L for library @ items+
        step A @ items -> end items, stop_trainers
        batch L for library @ items -> no_batch
        passing L for library
        batch L for library
    """,
    "the last batch of an evaluation is none of the next step": """
        made A
        batch V for library
        drained
        step A
        batch V for library
        drained
        step A -> stop_trainers
        passing V for library
        batch V for library
    """,
    "evaluation comes first, with as many batches as it has": """
        passing V
        200 x batch V
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        = num_cut 0
    """,
    "a long evaluation after the end: 32 batches that leave nothing": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        passing V
        32 x batch V
        batch V -> no_batch, has_enough
        = num_cut 1
        passing V
        batch V
        batch V -> no_batch, has_enough
        passing W
        32 x batch W
        batch W -> no_batch, has_enough
        = num_cut 3
    """,
    "an evaluation that keeps its logits goes on, until it keeps no more": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        passing V
        32 x batch V
        held 1
        batch V
        held 2
        63 x batch V
        batch V -> no_batch, has_enough
    """,
    "an iterator of workers is one for all passes": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        passing V
        20 x batch V by workers
        backward
        step A @ more+
        step A @ more+ -> end more, stop_trainers
        passing V
        32 x batch V by workers
        batch V by workers -> no_batch, has_enough
        passing V
        batch V by workers
        batch V by workers -> no_batch, has_enough
    """,
    "an iterator that was under way when the training has ended begins its next pass anew": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        20 x batch V by workers
        passing V
        32 x batch V by workers
        batch V by workers -> no_batch, has_enough
    """,
    "an iterator that is gone is no other one of its loader": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        passing V
        20 x batch V by first
        gone first
        20 x batch V by first
        12 x batch V by first
        batch V by first -> no_batch, has_enough
    """,
    "a loader that is gone has no passes of another one": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        passing V
        gone V
        passing V
        2 x batch V
    """,
    "an evaluation without end: the loops around it are ended": """
        made A
        step A @ items+, epochs
        step A @ items+, epochs -> end items epochs, stop_trainers
        100 x passing V @ tries+, *names, epochs
        passing V @ tries+, *names, epochs -> end tries epochs
    """,
    "passes that a loader's own generator counts are no passes twice": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        100 x passing V @ tries+
        passing V inner @ tries
        passing V @ tries+ -> end tries
    """,
    "passes before the end are not counted": """
        made A
        step A @ items+
        100 x passing V @ items
        step A @ items+ -> end items, stop_trainers
        passing V @ tries+
    """,
    "passes of each training are counted anew": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        100 x passing V @ tries+
        backward
        step A @ more+
        step A @ more+ -> end more, stop_trainers
        100 x passing V @ tries+
        passing V @ tries+ -> end tries
    """,
    "gradients before the optimizer: training begins at its step": """
        21 x backward @ first+
        backward @ first+ -> end first, stop_trainers
        there A
        batch L @ items+
        step A @ items
        = num_steps 1
        = was_ended false
        batch L @ items+
        step A @ items -> end items, stop_trainers
    """,
    "a pass over a loader sees such an optimizer, too": """
        21 x backward @ first+
        backward @ first+ -> end first, stop_trainers
        there A
        passing L
        = num_steps 0
        = is_ending false
    """,
    "steps by hand with a loader of a library": """
        batch L for library
        21 x backward
        backward -> stop_trainers
        batch L for library -> no_batch
        backward
        backward -> leave
    """,
}
