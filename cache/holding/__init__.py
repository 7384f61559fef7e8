"""Which shards a node holds: bringing, keeping, healing, evicting and counting them."""
