"""S3: a bucket, or a prefix of one, as an object store; every request ends in time, and no answer is trusted blindly.

Read store.py first: `S3Store` writes, deletes and lists, and reader.py reads. Below them are requests.py (one request
with its retries), failures.py (botocore's errors as our errors), client.py (the boto3 client), transport.py and
deadline.py (connections and time limits), listing.py (pages of a listing) and lock_files.py (locks of this machine's
processes).
"""
