"""Small messages between the ranks of one job: posted once, and looked up by polling, never by a collective.

Read base.py first: the protocol `Ranks`, which TorchRanks and, in one process, LocalRank satisfy. save/ranks/ has the
order of the messages in a save.

base.py          Ranks: small messages between ranks, and the notice of a dead one
choose.py        which ranks of a torch.distributed job save together
torch_ranks.py   TorchRanks: the ranks of a job, over a TCPStore of its own
split_values.py  values that are larger than the server of a TCPStore accepts
process_ends.py  rank 0 notices within a second that the process of another rank has ended
local.py         LocalRank: the ranks of one process, as threads
messages.py      the messages, as structs
questions.py     rank 0 answers for all ranks, so that all use the same answer
preemption.py    a job that is told to end saves once more, all ranks at the same step
notices.py       a file, a URL or a function tells the job to end
"""
