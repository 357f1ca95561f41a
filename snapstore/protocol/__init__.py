"""Protocol: the steps by which no save, rewrite, forget or gc deletes what another of them needs.

A save or a rewrite is a claim: it announces a session, writes packs and manifests, then creates one create-only record;
a gc marks what no record needs, waits for or fences every session, then deletes. Read commit.py first, then gc.py, then
docs/design/protocol.md for why the order of their steps is safe.
"""
