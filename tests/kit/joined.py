"""A plugin of pytest: repositories of tests have pages, and every upkeep and gc joins two snapshots or more.

python -m pytest -p kit.joined tests/stateful
"""

from snapstore.catalog import config
from snapstore.format.records import PAGES
from snapstore.protocol import joining

config.NEW_FEATURES.append(PAGES)
joining.AT_LEAST = 2
