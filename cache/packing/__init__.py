"""What `deeplink.cache.packer` works with: plans, shards being built, members that pack, versions that follow."""
