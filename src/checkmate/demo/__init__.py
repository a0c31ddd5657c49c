"""`checkmate demo`: a run whose workers are killed, compared bit by bit with one that is left in peace.

gpt.py        the training script, a link to examples/gpt.py; it knows nothing of the demo
plan.py       which kills a seed stands for
worker.py     one rank: runs the script, notes what it does, keeps its final state
saboteur.py   stands beside the checkpointer and kills all ranks at the planned moment
journal.py    what each rank did, line by line, written so that it outlives a kill
runs.py       starts, follows and ends the shadow and the workers, here or in a lab
traffic.py    in a lab: what went over each link, and what replication cost the workers
verdict.py    steps lost and step times out of the journals; the final states, compared
picture.py    both loss curves in one PNG
"""
