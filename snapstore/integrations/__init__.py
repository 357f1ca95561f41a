"""Adapters for trainers and other packages: one module for each, with an optional extra; import it by its name.

A module imports its own package only, and snapstore does not import the module, so an unused adapter costs nothing.
Each uses the public calls of its package; a private call is made in one function, which checks the release. Read
transformers.py first.

transformers.py        Hugging Face's Trainer: a callback that saves, a folder from which it resumes
transformers_files.py  the files of that folder, written from a snapshot
accelerate.py          all that an `Accelerator` has prepared
lightning.py           Lightning: a CheckpointIO, and a callback with our policies
lightning_loops.py     the names of Lightning's Trainer that are not public
torchtitan.py          a checkpoint manager that replaces torchtitan's own
deepspeed.py           DeepSpeed: a CheckpointEngine
megatron.py            Megatron-core and NeMo: strategies of `dist_checkpointing`
fsspec.py              snapshots as read-only files
monitoring.py          hooks for TensorBoard, Weights & Biases, MLflow and Prometheus
references.py          small files that stand where a trainer expects a checkpoint
stored_optimizers.py   the checks of `restore_into` around a trainer's own `load_state_dict`
"""
