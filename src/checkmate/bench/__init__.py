"""Benchmarks: ``checkmate bench overhead | ingest | restore | network``. Each measures a limit in the same run.

overhead.py   what a checkpoint of every step costs the workers
baselines.py  what it costs to save every step in other ways
ingest.py     how fast one core receives gradients and applies them
streamer.py   a trainer for that, which sends as fast as it is heard
restore.py    how fast the state comes back
limits.py     raw TCP, and torch's optimizer alone
network/      what replication by the network costs and brings, in a lab
common.py     processes on cores of their own, figures and their verdicts
"""
