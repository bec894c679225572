"""Scripts as people write them, as events (`event_lists.read`): optimizers and loops.

Each was once ended too early or too late, or holds a condition of the reducer that no other one
holds: `test_steering_breaks.py` breaks each of them.
"""

ROWS = {
    "while True until it has converged": """
        made A
        step A @ steps+
        step A @ steps+ -> end steps, stop_trainers
        = num_steps 2
        = was_ended true
    """,
    "steps that were not asked for end nothing": """
        wanted 0
        made A
        step A @ steps+
        step A @ steps+
        step A @ steps+
        = num_steps 3
    """,
    "one step is enough where one is asked for": """
        wanted 1
        made A
        step A @ steps+ -> end steps, stop_trainers
    """,
    "a training, and another one by the same optimizer": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        backward
        backward
        step A @ more+
        step A @ more+ -> end more, stop_trainers
        = num_steps 4
        = num_trainings 1
    """,
    "a step begins the next training, where no backward pass is told": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        step A @ more+
        step A @ more+ -> end more, stop_trainers
        = num_steps 4
    """,
    "four passes are one step": """
        made A
        3 x backward @ items+
        step A @ items
        4 x backward @ items+
        step A @ items -> end items, stop_trainers
    """,
    "a GAN: the generator steps after five critics": """
        made A
        made B
        5 x step A @ critics+, rounds
        step B @ rounds
        5 x step A @ more+, rounds
        step B @ rounds -> end rounds, stop_trainers
        = num_steps 10
    """,
    "a GAN: enough is seen in the round of the critics": """
        made A
        made B
        step A @ rounds+
        step B @ rounds
        step B @ rounds+
        step A @ rounds -> end rounds, stop_trainers
    """,
    "a GAN, one of whose optimizers never steps": """
        made A
        made B
        19 x step A @ rounds+
        step A @ rounds+ -> end rounds, stop_trainers
    """,
    "a GAN: the slower one has a last round of its own": """
        made A
        made B
        19 x step A @ first+, epochs
        step A @ first+, epochs -> end first epochs, stop_trainers
        step B @ second+, epochs
        step B @ second+, epochs -> end second epochs
        = num_steps 20
    """,
    "two GANs: optimizers of the first one are not waited for": """
        made A
        made B
        2 x step A @ rounds+
        step B @ rounds+
        step B @ rounds+ -> end rounds, stop_trainers
        made C
        backward
        step C @ more+
        step C @ more+ -> end more, stop_trainers
    """,
    "two trainings of a GAN: both optimizers are waited for again": """
        made A
        made B
        2 x step A @ rounds+
        step B @ rounds+
        step B @ rounds+ -> end rounds, stop_trainers
        backward
        2 x step A @ more+
        step B @ more+
        step B @ more+ -> end more, stop_trainers
    """,
    "L-BFGS: passes within a step are no steps of their own": """
        made A
        stepping A @ steps+
        4 x backward @ steps
        stepped A @ steps
        stepping A @ steps+
        4 x backward @ steps
        stepped A @ steps -> end steps, stop_trainers
    """,
    "L-BFGS: the steps that fill its history": """
        made A
        stepping A @ steps+
        stepped A 4 @ steps
        2 x step A @ steps+
        step A @ steps+ -> end steps, stop_trainers
        backward
        step A @ more+
        step A @ more+ -> end more, stop_trainers
    """,
    "what is held has grown with the last step wanted: it may go on so": """
        made A
        step A @ steps+
        held 1
        4 x step A @ steps+
        step A @ steps+ -> end steps, stop_trainers
        = num_steps 6
        backward
        step A @ more+
        held 2
        4 x step A @ more+
        step A @ more+ -> end more, stop_trainers
    """,
    "what is held has grown with the first step alone": """
        made A
        held 8
        step A @ steps+
        step A @ steps+ -> end steps, stop_trainers
    """,
    "what is held grows with the third step, after those wanted": """
        made A
        made B
        2 x step A @ steps+
        held 1
        step A @ steps+
        step B @ steps
        step B @ steps -> end steps, stop_trainers
    """,
    "more steps were asked for than show growth": """
        wanted 8
        made A
        7 x step A @ steps+
        held 1
        step A @ steps+ -> end steps, stop_trainers
    """,
    "folds: the loop that makes the optimizer goes on": """
        made A @ folds+
        step A @ epochs+, folds
        step A @ epochs+, folds -> end epochs, stop_trainers
        gone A
        made B @ folds+
        step B @ more+, folds
        step B @ more+, folds -> end more, stop_trainers
        = num_steps 4
    """,
    "an optimizer made in the first round alone ends with its loop": """
        made A @ steps+
        step A @ steps
        step A @ steps+ -> end steps, stop_trainers
    """,
    "sweeps without end: the eleventh is the last": "\n".join(
        f"""
        made {name} @ sweeps+
        step {name} @ {name.lower()}+, sweeps
        step {name} @ {name.lower()}+, sweeps -> end {name.lower()}{last}, stop_trainers
        """
        for name, last in [*((name, "") for name in "ABCDEFGHIJ"), ("K", " sweeps")]
    ),
    "an optimizer made after the end begins the next training at its step": """
        made A
        step A @ items+, epochs
        step A @ items+, epochs -> end items epochs, stop_trainers
        made B
        step B @ items
        step B @ items -> end items, stop_trainers
        = num_trainings 1
    """,
    "one made while the loops end begins none": """
        made A
        step A @ items+, epochs
        step A @ items+, epochs -> end items epochs, stop_trainers
        made B @ epochs
        step B @ epochs
        = num_trainings 0
    """,
    "one made after a training that ended no loop begins the next with its pass": """
        made A
        step A
        step A -> stop_trainers
        made B
        backward
        = is_ending false
        step B @ steps+
        step B @ steps+ -> end steps, stop_trainers
        = num_trainings 1
    """,
    "one made after a training that ended no loop begins the next with its step": """
        made A
        step A
        step A -> stop_trainers
        made B
        step B @ steps+
        step B @ steps+ -> end steps, stop_trainers
        = num_trainings 1
    """,
    "a step in a loop, after a training that ended none": """
        made A
        step A
        step A -> stop_trainers
        stepping A @ items+ -> end items
        stepped A @ items -> end items
    """,
    "phases by name: their loop goes on": """
        made A
        step A @ items+, *phases, epochs
        step A @ items+, *phases, epochs -> end items epochs, stop_trainers
    """,
    "a few numbers of steps: a loop over them ends, as it is the innermost": """
        made A
        step A @ *steps+
        step A @ *steps+ -> end steps, stop_trainers
    """,
    "steps after the end in the loop that ends: not without end": """
        made A
        step A @ epochs+
        step A @ epochs -> end epochs, stop_trainers
        20 x step A @ epochs -> end epochs
        stepping A @ epochs -> leave
    """,
    "another optimizer in the loop that ends, which has not made its steps": """
        made A
        made B
        19 x step A @ items+, epochs
        step A @ items, epochs -> end items epochs, stop_trainers
        step B @ epochs
        step B @ epochs -> end epochs
    """,
    "a loop of a library that nothing ends: the script is left": """
        made A
        step A
        step A -> stop_trainers
        stepping A -> leave
        = was_left true
    """,
    "a framework that says twice that it begins": """
        made A
        begun
        step A @ items+
        begun
        step A @ items+ -> end items, stop_trainers
    """,
    "no optimizer: twenty passes are free, and the next are steps": """
        20 x backward @ steps+
        = is_by_hand false
        backward @ steps+
        = is_by_hand true
        backward @ steps+ -> end steps, stop_trainers
        = num_steps 2
    """,
    "no optimizer: the loops around end in their first round, too": """
        21 x backward @ steps+, epochs
        backward @ steps+, epochs -> end steps epochs, stop_trainers
    """,
    "passes without an optimizer in a loop of a library: left": """
        21 x backward
        backward -> stop_trainers
        backward -> leave
    """,
    "an optimizer that steps at once after such passes": """
        21 x backward @ first+
        backward @ first+ -> end first, stop_trainers
        there A
        step A @ items+
        = num_steps 1
        step A @ items+ -> end items, stop_trainers
    """,
    "passes with an optimizer are no steps": """
        made A
        40 x backward @ items+
        = num_steps 0
    """,
    "an optimizer that is gone holds no loop": """
        made A @ folds+
        made B
        step A @ folds
        gone A
        step B @ folds
        step B @ folds -> end folds, stop_trainers
    """,
    "an optimizer that has not stepped holds no loop": """
        made A
        made B @ steps+
        there A
        step A @ steps
        step A @ steps -> end steps, stop_trainers
    """,
    "a loop of the library is around, and has not returned": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        in library
        backward
        = num_trainings 0
        out of library
        backward
        = num_trainings 1
    """,
}
