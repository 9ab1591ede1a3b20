"""Jobs on a cluster: packed, sent, followed, chained."""
