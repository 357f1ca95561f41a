"""S3: a bucket, or a prefix of one, as an object store; every request ends in time, and no answer is trusted blindly.

Read store.py first: it writes, deletes and lists. Errors of botocore end in failures.py.

store.py       S3Store: the key is the name below the prefix
reader.py      whole objects and ranges, long ones by several requests at once
requests.py    requests about the objects below one prefix
retry.py       send a request again, after a pause with jitter
failures.py    errors of botocore as errors of snapstore
client.py      the boto3 client, from a URL and the standard AWS configuration
transport.py   botocore's HTTP session with a deadline for each request
deadline.py    time limits that hold whatever a request waits for
listing.py     the pages of a listing; a page that contradicts itself is refused
lock_files.py  which objects are locked by a live process of this machine
"""
