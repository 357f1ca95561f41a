"""Small messages between the ranks of one job: posted once, looked up, never waited for by a collective.

Read `base.py` first: the protocol `Ranks`, which `TorchRanks` (torch_ranks.py) and, in one process, `LocalRank`
(local.py) satisfy. messages.py has what they say to each other; `save/together.py` has the order in which they say it.
"""
