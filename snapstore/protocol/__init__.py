"""Keep saves, rewrites, forgets and gcs from deleting or publishing what another of them relies on.

A save or a rewrite is a claim: it announces a session, writes packs and manifests, then creates one create-only record.
A gc marks what no record needs, waits for or fences every session, then deletes. Read claim.py first, then gc.py; the
proofs are in docs/design/protocol.md.
"""
