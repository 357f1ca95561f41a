"""The kit: the modules that several test files share. A test imports them one way: `from kit.faults import FaultStore`.

Each module states in its docstring how to use it. `tests/` is on the path (conftest.py); other processes that import the
kit get it from `kit.processes.environment`.

| module | it gives | take it when |
|---|---|---|
| `rank_saves` | saves of several ranks in one process, and what they have stored | a test is about shares, boxes, roots or children |
| `repositories` | small repositories whose every version is known; `save`, `opened`, `check_whole`, `check_clean` | a test saves and restores, and any content will do |
| `objects` | the keys of a store, a copy of it, `flip` and `replace` | a test looks at stored bytes or changes them |
| `samples` | `SEED`, `THOROUGH`, `sampled` | a harness has more cases than a run of the tests can try |
| `faults` | `FaultStore`, which fails at its k-th operation; `one_thread` | a store fails or a process dies inside an operation |
| `actors` | threads that take turns, one store operation at a time | the order of the operations of two processes matters |
| `schedules` | verbs as functions of a store, run at the same time in a random or a given order | several processes work on one repository |
| `interrupts` | a KeyboardInterrupt at a chosen place of some files | Ctrl-C in the main thread of a process that lives on |
| `mirrored` | a manager with a mirror, its saves, and the steps that a store then has | a test is about mirrors |
| `stalls` | a store whose k-th operation takes long, and the work of others meanwhile | a process sleeps inside an operation |
| `lies` | a store that gives one wrong answer, and all wrong answers of an operation | a store breaks its own contract |
| `power` | a recorder of system calls, and the disks that a power loss may leave | a test is about fsync |
| `slow_survey` | compact's survey of a repository, by plain loops, and a comparison | a test changes what compact finds |
| `blamed` | trainings of small models with a fault injected at a step | a test is about `blame` |
| `damage` | a small repository with an object of each class, and every way to damage one | check and repair must find damage |
| `forge` | blobs, packs, manifests and records with valid checksums and hostile contents; limits on time and memory | the repository is hostile |
| `rank_snapshots` | snapshots of several ranks in any boxes, written without ranks, and read back without a restore | a verb meets root and child manifests |
| `changes` | every way to change an array, at every moment of a save | the caller changes a state while it is saved |
| `ranks` | jobs of several ranks in one process, each a thread with a store of its own | ranks save together |
| `local_ranks` | `LocalRanks`: ranks over one dict, with messages that are late, lost or doubled by a seed | ranks exchange messages |
| `chaos`, `chaos_worker` | real processes that are killed and stopped at random, and a judge of what is left | a repository must survive whatever happens to processes |
| `packs` | `scan`, which finds the blobs of a pack without its footer | a test looks into packs |
| `sparse_deltas` | chunks that differ a little from their bases, and hostile payloads | a test reads sparse deltas |
| `reference` | the CPU engine without its extension; functions in place of `blob.encode` and `hashing.digest` | a test replaces a function that the extension does not call |
| `foreign` | blobs in codec 70 without a GPU | a CPU meets nvCOMP's codec |
| `hosts` | a writer and a collector without torch, each a process | several hosts share one bucket |
| `s3_stores` | moto, and the real server of `tools/s3-server` | a test needs S3 |
| `socket_server` | a server over raw sockets, and the parts of an HTTP head | a test needs a server that speaks no proper HTTP |
| `garbage` | a count of the new objects that Python's garbage collector finds alive | a test is about full collections, which stop all threads |
| `tcp_proxy` | a proxy that cuts, stalls and damages the requests to a real S3 server | the network fails |
| `lying_proxy` | a proxy that answers one request to a real S3 server wrongly | a server or its proxy lies to whole processes |
| `hostile_s3` | an S3 server over raw sockets that answers by a table of lies | a single answer is malformed, slow or wrong |
| `dcp_ranks` | cases of snapstore.dcp that a world of real ranks with gloo runs one after the other | a promise of DCP needs several ranks |
| `states` | exact comparison, a snapshot in memory, objects to put into a state | a test is about flattening and restoring a state |
| `device_memory` | restores and saves through device memory; CPU tensors stand in where there is no device | a test is about where restored tensors are placed |
| `gpu_states` | states of known bytes on any device, comparison by digests, a process without a GPU | a test of the GPU engine |
| `machines` | a CUDA device and the emulator of thread blocks (`emulator.h`), which both run kernels | a test of one kernel |
| `joined` | joins of two snapshots at a time, as a plugin of pytest | a harness must hold while records are joined |
| `fake_cuda` | a CUDA device made of the CPU, as a plugin of pytest | the host code of the GPU engine runs without a GPU |
| `remembered` | the same bytes are decoded only once in a process of the tests; the fixture `remembering` | a test is about which objects are stored, read or damaged, and not about how they are decoded |
| `tally` | counts of the cases that a harness tried, for `tools/torture` | a test is one of its harnesses |
| `killed_jobs` | jobs of `tools/train_ranks.py` under torchrun, each killed after an event that it waits for | jobs must lose nothing when ranks are killed |
| `rank_worker` | a rank of a training with FSDP2 or DDP that can kill itself, a script | real processes with gloo are killed or stopped |
| `hugging_face`, `hugging_face_ranks` | trainings with transformers and Accelerate, on one rank and on two; scripts | a test needs their Trainer |
| `lightning_worker` | trainings with Lightning in forks of one process, which may be killed | a test needs a Trainer |
| `deepspeed_worker` | a rank of a training with DeepSpeed, a script | a test needs ZeRO |
| `megatron_worker` | a rank that saves or loads a sharded state of Megatron, a script | a test needs `dist_checkpointing` |
| `torchtitan_worker` | a rank of a training with torchtitan's components, a script | a test needs `torchtitan` |
| `shell` | `invoke`, which runs a verb and returns its output | a test calls the shell in its own process |
| `forked` | `Forked`: a process of its own, forked from one that has imported torch | a test starts processes that train or are killed |
| `waits` | `until`, which waits for a condition | other threads or processes do something |
| `browser` | a real browser that shows one page, without a network | a test is about a page of HTML |
| `processes` | the checkout's folders, the environment for another process, and `run_python` | a test starts Python |
"""  # noqa: E501
