import os

from jaxtyping import install_import_hook

os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")

# Every shape that a signature states is checked at every call of the tests.
install_import_hook("ssl_sec", "beartype.beartype")
