"""Protocol: the steps by which no save, rewrite, forget or gc deletes what another of them needs.

A save or a rewrite is a claim: it announces a session, writes packs and manifests, then creates one create-only record;
a gc marks what no record needs, waits for or fences every session, then deletes. Read claim.py first, then gc.py, then
docs/design/protocol.md for why the order of their steps is safe.

same_repository.py      write and delete only in the repository that was opened
session.py              a save's claim, and the snapshots that it may build on
claim.py                the claim of a save or a rewrite, from its session to its record
revisions.py            the create-only records that follow a snapshot's first one
joining.py              copy loose records into pages, then delete them
tags.py                 keep each tag on one snapshot of a run
forget.py               mark snapshots as forgotten, and bring them back
gc.py                   delete what no committed snapshot needs: mark, wait, sweep
notes.py                the notes below `gc/`: what gcs will delete, and packs that a repair has found damaged
liveness.py             which sessions a gc must wait for, and how a dead one is fenced
unexplained_objects.py  packs and manifests that no record accounts for
"""
