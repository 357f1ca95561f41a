"""The resume matrix: does a resumed training compute the losses of the uninterrupted one, bit for bit?

A pair is an optimizer, a layout of the parameters, a dtype and a path: a way to save and to resume. `optimizers.py`
lists the optimizers, `training.py` has the model and its layouts, and `paths.py` trains, saves and resumes. `record.py`
judges the outcomes and writes docs/benchmarks/resume.json. `__main__.py` reads the command line and runs the pairs in a
few processes (`workers.py`). Read paths.py first.
"""
