"""Small messages between the ranks of one job: posted once, and looked up by polling, never by a collective.

Read `base.py` first: the protocol `Ranks`, which `TorchRanks` (torch_ranks.py) and, in one process, `LocalRank`
(local.py) satisfy. messages.py defines the messages; `save/ranks/together.py` has their order in a save. process_ends.py
notices killed processes.
"""
