"""While jobs wait: their wishes kept, mended or dropped as the cluster changes, so that a wish never holds one."""
