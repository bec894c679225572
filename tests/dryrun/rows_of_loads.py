"""Scripts as people write them, as events (`event_lists.read`): loads.

Each was once ended too early or too late, or holds a condition of the reducer that no other one
holds: `test_steering_breaks.py` breaks each of them.
"""

ROWS = {
    "epochs over a loader, and an evaluation after each": """
        made A
        passing L @ epochs+
        batch L @ items+, epochs
        step A @ items, epochs
        batch L @ items+, epochs
        step A @ items, epochs -> end items epochs, stop_trainers
        passing V @ epochs
        batch V @ epochs
        batch V @ epochs
        drained @ epochs
        loaded
        = is_ending true
    """,
    "a Trainer that resumes in the middle has its own begin": """
        begun
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached X trained @ items
        = is_ending true
    """,
    "a resume in the loop: the loop goes on, three times": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached X trained @ items -> go_on
        = is_ending false
        passing V @ items
        40 x batch V @ items
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached Y trained @ items -> go_on
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached Z trained @ items -> go_on
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached W trained @ items
        = num_steps 8
        = num_resumes 3
    """,
    "a resume of the whole run by a checkpointer": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        loaded whole @ items -> go_on
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        loaded whole
        = num_resumes 1
    """,
    "a load into a run that has no step yet goes on counting": """
        made A
        loaded whole
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        = num_resumes 0
    """,
    "steps before and after a load are added up": """
        made A
        made B
        step A @ items+
        loaded
        step A @ items+
        = num_steps 2
        step B @ items
        = num_steps 2
        step B @ items -> end items, stop_trainers
        = num_steps 3
        = num_counts 1
    """,
    "a load asks growth anew": """
        made A
        step A @ items+
        loaded
        held 1
        step A @ items+ -> end items, stop_trainers
    """,
    "a load forgets that more steps are needed": """
        made A
        made B
        stepping A @ items+
        stepped A 4 @ items
        step A @ items+
        loaded
        step B @ items
        step B @ items -> end items, stop_trainers
    """,
    "the best is loaded after the loops: no resume": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached X trained
        = is_ending true
        = num_resumes 0
    """,
    "another model is loaded in the loop: no resume": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached X @ items
        = num_resumes 0
    """,
    "a load into what is trained, before enough was seen": """
        made A
        step A @ items+
        reached X trained @ items
        step A @ items+ -> end items, stop_trainers
        = num_resumes 0
        = num_counts 1
    """,
    "a script copies tensors of a file by itself: the first of them resumes": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        read @ items
        reached X copied @ items
        reached Y trained copied @ items -> go_on
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached Z trained copied @ items
        read @ items
        reached W trained copied @ items -> go_on
    """,
    "copies of what is in no file are no resume": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached X trained copied @ items
        = num_resumes 0
    """,
    "a state dict is a resume whether or not copies of its file were one": """
        made A
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached X trained @ items -> go_on
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        read @ items
        reached Y trained @ items -> go_on
        step A @ items+
        step A @ items+ -> end items, stop_trainers
        reached Z trained copied @ items -> go_on
    """,
    "a load in each round, before its steps: the loop goes on, three rounds": """
        made A
        reached X @ rounds+
        step A @ a+, rounds
        noted X
        step A @ a+, rounds -> end a, stop_trainers
        reached Y trained @ rounds+
        step A @ b+, rounds
        noted Y
        step A @ b+, rounds -> end b, stop_trainers
        reached Z trained @ rounds+
        step A @ c+, rounds
        noted Z
        step A @ c+, rounds -> end c, stop_trainers
        reached W trained @ rounds+
        step A @ d+, rounds
        noted W
        step A @ d+, rounds -> end d rounds, stop_trainers
    """,
    "a load in the first round alone: the loop ends": """
        made A
        reached X @ rounds+
        step A @ rounds
        noted X
        step A @ rounds+ -> end rounds, stop_trainers
    """,
    "a load in this round of another model: the loop ends": """
        made A
        reached X @ rounds+
        step A @ rounds
        step A @ rounds -> end rounds, stop_trainers
    """,
    "a load in this round after its first step: the loop ends": """
        made A
        step A @ rounds+
        reached X trained @ rounds
        noted X
        step A @ rounds -> end rounds, stop_trainers
    """,
    "of two loads in a round one is of what is trained": """
        made A
        reached X @ rounds+
        reached Y @ rounds
        step A @ items+, rounds
        noted Y
        step A @ items+, rounds -> end items, stop_trainers
    """,
    "a load in an inner loop is in this round of the outer one, too": """
        made A
        reached X @ shards+, rounds+
        reached Y @ shards+, rounds
        step A @ items+, rounds
        noted X
        step A @ items+, rounds -> end items, stop_trainers
    """,
    "loads before steps by hand, which are of all that is trained": """
        reached X @ rounds+
        21 x backward @ rounds
        backward @ rounds -> stop_trainers
        = is_by_hand true
    """,
    "steps by hand: a load in the loop is a resume": """
        21 x backward @ steps+
        backward @ steps+ -> end steps, stop_trainers
        reached X @ steps -> go_on
        = num_resumes 1
    """,
}
