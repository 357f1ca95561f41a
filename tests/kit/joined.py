"""A plugin of pytest: every upkeep and gc joins two snapshots or more.

python -m pytest -p kit.joined tests/stateful
"""

from snapstore.protocol import joining

joining.AT_LEAST = 2
